"""On CPU devices what exchanges something behind a loop that does reads what the loop left: XLA's executor
waits for nothing else."""

from __future__ import annotations

import re

import pytest

from tests.jax_process import printed

SENDS = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(")
CALLED = re.compile(r"(?:condition|body|true_computation|false_computation)=%([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def unordered(text: str) -> list[tuple[str, str]]:
    """Pairs in compiled text: a loop or branch with collectives, and what exchanges something beside it."""
    computations: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
            here = computations[header[1]] = {}
        elif made := re.match(r"\s+(?:ROOT )?%([\w.-]+) = (.*)", line):
            here[made[1]] = made[2].split(", metadata=")[0]

    def called(line: str) -> list[str]:
        branches = [b.strip(" %") for found in BRANCHES.findall(line) for b in found.split(",")]
        return [*CALLED.findall(line), *branches]

    def sends(line: str) -> bool:
        return bool(SENDS.search(line)) or any(
            sends(inner) for name in called(line) for inner in computations[name].values()
        )

    found = []
    for lines in computations.values():
        busy = [name for name, line in lines.items() if sends(line)]
        reads: dict[str, set[str]] = {}
        for name, line in lines.items():  # operands stand before what reads them
            inputs = [i for i in re.findall(r"%([\w.-]+)", line) if i in lines and i != name]
            reads[name] = set(inputs).union(*(reads.get(i, set()) for i in inputs))
        for i, one in enumerate(busy):
            for other in busy[i + 1 :]:
                if (called(lines[one]) or called(lines[other])) and one not in reads[other]:
                    found.append((one, other))
    return found


TEXT = """HloModule m, is_scheduled=true

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  %x = f32[4] get-tuple-element(%p), index=1
  ROOT %sum = f32[4] all-reduce(%x), channel_id=1
}

%holds (p.1: (s32[], f32[4])) -> pred[] {
  ROOT %p.1 = pred[] parameter(0)
}

ENTRY %main (a: f32[4], b: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  %b = f32[4] parameter(1)
  %loop = f32[4] while(%a), condition=%holds, body=%body
  %tied = f32[4] add(OPERANDS)
  ROOT %sent = f32[4] collective-permute(%tied), source_target_pairs={{0,1}}
}
"""


@pytest.mark.parametrize(("operands", "found"), [("%loop, %b", []), ("%b, %b", [("loop", "sent")])])
def test_what_is_not_in_order_is_seen(operands: str, found: list[tuple[str, str]]) -> None:
    assert unordered(TEXT.replace("OPERANDS", operands)) == found


@pytest.mark.nightly
def test_a_pipeline_with_sequence_parallelism_exchanges_in_order() -> None:
    """Its forward and backward of a tick are of different microbatches: neither reads the other."""
    texts = printed("tests.engines.collective_order_cases")
    assert unordered(texts["with turns"]) == []
    assert unordered(texts["without"])
