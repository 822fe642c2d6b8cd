"""What is read from compiled text: groups in every notation, loops, what travels together, cycles."""

from __future__ import annotations

import pytest

from mesh_tf_core.engines.jax.hlo import HloCollective, read

HEADER = "HloModule jit_step, is_scheduled=true\n\n"
ADD = """%add.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

"""


def entry(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"ENTRY %main (p: f32[8,4], q: bf16[6]) -> f32[8,4] {{\n{body}\n}}\n"


PARAMETERS = (
    "%p = f32[8,4]{1,0:T(8,128)S(1)} parameter(0)",
    "%q = bf16[6]{0:T(256)} parameter(1)",
)


def found(*lines: str) -> tuple[HloCollective, ...]:
    return read(HEADER + ADD + entry(*PARAMETERS, *lines)).collectives


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%r = f32[8,4]{1,0} all-reduce(%p), "
            "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add.1",
            HloCollective("all_reduce", 4, 1, 128, 1),
        ),
        (
            "%r = f32[8,4]{1,0} all-reduce-start(%p), replica_groups=[2,8]<=[4,4]T(1,0), to_apply=%add.1",
            HloCollective("all_reduce", 8, 1, 128, 1),
        ),
        (
            "%r = f32[8,4]{1,0} all-reduce(%p), channel_id=1, "
            "replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_3'=4] {'axis_0','axis_1'}, to_apply=%add.1",
            HloCollective("all_reduce", 2, 1, 128, 1),
        ),
        (
            "%r = f32[32,4]{1,0} all-gather(%p), channel_id=1, "
            "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, "
            "dimensions={0}, use_global_device_ids=true",
            HloCollective("all_gather", 4, 1, 128, 1),
        ),
        (
            "%r = f32[8,4]{1,0} all-reduce(%p), "
            "replica_groups=mesh['a'=2,'b'=8] {'a','b':(2)4}, to_apply=%add.1",
            HloCollective("all_reduce", 8, 1, 128, 1),
        ),
        (
            "%r = (f32[8,4]{1,0}, /*index=1*/bf16[6]{0}) all-reduce(%p, /*index=1*/%q), "
            "replica_groups={}, to_apply=%add.1",
            HloCollective("all_reduce", 0, 2, 140, 1),
        ),
        (
            "%r = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%p), "
            "replica_groups=[2,4]<=[8], dimensions={0}",
            HloCollective("all_gather", 4, 1, 128, 1),
        ),
        (
            "%r = f32[2,4]{1,0} reduce-scatter(%p), "
            "replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add.1",
            HloCollective("reduce_scatter", 4, 1, 128, 1),
        ),
        (
            "%r = f32[8,4]{1,0} collective-permute(%p), "
            "source_target_pairs={{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}",
            HloCollective("permute", 4, 1, 128, 1),
        ),
        (
            "%r = f32[8,4]{1,0} all-to-all(%p), replica_groups={{0,1},{2,3}}, dimensions={0}",
            HloCollective("all_to_all", 2, 1, 128, 1),
        ),
    ],
)
def test_collectives(line: str, expected: HloCollective) -> None:
    assert found(line) == (expected,)


def test_done_is_not_another_one() -> None:
    lines = (
        "%s = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%p), "
        "replica_groups=[2,4]<=[8], dimensions={0}",
        "ROOT %r = f32[32,4]{1,0} all-gather-done(%s)",
    )
    assert len(found(*lines)) == 1


def test_steps_of_one_collective_are_one() -> None:
    step = (
        "%s{} = f32[32,4]{{1,0}} all-gather(%p), replica_groups=[2,4]<=[8], "
        'frontend_attributes={{chain_id="{}"}}'
    )
    assert len(found(step.format(1, 7), step.format(2, 7), step.format(3, 8))) == 2


LOOP = (
    HEADER
    + ADD
    + """%inner (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  ROOT %y = f32[8,4]{1,0} multiply(%x, %x), backend_config={"estimated_cycles":"1000"}
}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %one = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%i, %one)
  %f = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%inner, backend_config={"estimated_cycles":"7"}
  %r = f32[8,4]{1,0} all-reduce(%f), replica_groups={{0,1}}, to_apply=%add.1
  ROOT %t = (s32[]{:T(128)}, f32[8,4]{1,0}) tuple(%next, %r)
}

%test (state: (s32[], f32[8,4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  %state = (s32[]{:T(128)}, f32[8,4]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=ORDER
}

"""
    + entry(
        *PARAMETERS,
        "%zero = s32[]{:T(128)} constant(0)",
        "%t = (s32[]{:T(128)}, f32[8,4]{1,0}) tuple(%zero, %p)",
        "%w = (s32[]{:T(128)}, f32[8,4]{1,0}) while(%t), condition=%test, body=%body",
        '%k = f32[8,4]{1,0} custom-call(%p), backend_config={"estimated_cycles":"5"}',
        "ROOT %r = f32[8,4]{1,0} get-tuple-element(%w), index=1",
    )
)


LIBRARY = """  %s = f32[8,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", attributes={meta={
"block": 512
}}, metadata={op_name="splash"}
"""


def test_a_librarys_kernel_in_a_loop() -> None:
    """Its attributes have line breaks and braces of their own, which end no computation."""
    text = LOOP.replace("  %f =", LIBRARY + "  %f =").replace("STEP", "1").replace("ORDER", "LT")
    said = read(text)
    assert (said.cycles, said.libraries, said.unknown_loops) == (7 * 6 + 5, 6, 0)


@pytest.mark.parametrize(("step", "trips"), [(1, 6), (2, 3), (4, 2)])
def test_loops_count_as_often_as_they_run(step: int, trips: int) -> None:
    said = read(LOOP.replace("STEP", str(step)).replace("ORDER", "LT"))
    assert said.collectives == (HloCollective("all_reduce", 2, 1, 128, trips),)
    assert said.cycles == 7 * trips + 5  # what is fused is in the fusion's own estimate
    assert said.unknown_loops == 0


def test_a_loop_of_unknown_length_is_said() -> None:
    said = read(LOOP.replace("STEP", "1").replace("ORDER", "GT"))
    assert said.collectives[0].times == 1
    assert said.unknown_loops == 1


def test_the_compilers_own_count_wins() -> None:
    text = LOOP.replace("STEP", "1").replace("ORDER", "GT")
    known = text.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}')
    assert read(known).collectives[0].times == 9
    assert read(known).unknown_loops == 0


def test_nothing_in_nothing() -> None:
    assert read("").collectives == ()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%r = (f32[8,4]{1,0:T(8,128)}, f32[8,4]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%p)", (128, 0)),
        ("%r = (f32[8,4]{1,0:T(8,128)S(5)}, f32[8,4]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)", (0, 128)),
        ("%r = (f32[8,4]{1,0:T(8,128)S(1)}, f32[8,4]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)", (0, 0)),
        (
            "%r = ((f32[8,4]{1,0:T(8,128)S(5)}, s32[]{:T(128)}, s32[]{:T(128)}), f32[1,4]{1,0:T(1,128)}, "
            "u32[]{:S(2)}) dynamic-slice-start(%p, %i, %i), dynamic_slice_sizes={1,4}",
            (16, 0),
        ),
        (
            "%r = ((f32[8,4]{1,0:T(8,128)S(5)}, f32[1,4]{1,0:T(1,128)}, s32[]), "
            "f32[8,4]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%p, %x, %i)",
            (0, 16),
        ),
    ],
)
def test_what_goes_to_and_from_the_host(line: str, expected: tuple[int, int]) -> None:
    """Whole arrays, and slices of stacks that stay there."""
    moved = read(HEADER + ADD + entry(*PARAMETERS, line)).transfers
    assert (moved.get("host_load", 0), moved.get("host_store", 0)) == expected
