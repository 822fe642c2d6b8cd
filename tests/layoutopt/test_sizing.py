"""Families of real models, and answers about their size against the searches they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from examples.moe_lm import model as mixture
from examples.transformer_lm import llama3_8b
from examples.transformer_lm import model as transformer
from layoutopt.cli import size_tables
from layoutopt.models.hparams import defaults_of
from layoutopt.optimize.evaluation.evaluation import unsplit_flops
from layoutopt.plan.build import Plan
from layoutopt.plan.units import seconds_text
from layoutopt.runtime.clock import Clock
from layoutopt.sizing import timing
from layoutopt.sizing.answer import Answering
from layoutopt.sizing.family import Family, counted, powers_of, rounded_to
from layoutopt.sizing.forecast import Forecast
from layoutopt.sizing.laws import published
from layoutopt.sizing.question import SizingQuestion
from layoutopt.sizing.sizing import Sizing, machines_of
from layoutopt.sizing.timing import Timer, Timing
from mesh_tf_core import layers as nn
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError
from mesh_tf_core.model import Model

TINY = {"layers": 2, "d_model": 64, "d_ff": 256, "batch": 8, "length": 32, "vocab": 64}
LARGER = {**TINY, "d_model": 512, "d_ff": 2048, "batch": 64, "length": 256}
ASKED: dict[str, Any] = {"hardware": "tpu-v5e", "max_axes": 1}


def words(layers: int, d_model: int, d_ff: int, batch: int, length: int, vocab: int) -> Model:
    """A language model without attention: its searches are short."""
    b, s, v = mtf.Dim("batch", batch), mtf.Dim("length", length), mtf.Dim("vocab", vocab)
    g, forward = mtf.Graph("words"), nn.FeedForward(mtf.Dim("d_ff", d_ff))
    tokens, targets = g.input("tokens", [b, s]), g.input("targets", [b, s])
    embedding = nn.Embedding(v, mtf.Dim("d_model", d_model), "float32")
    table = embedding.table(g)
    x = mtf.scan(lambda x: x + forward(x), embedding(table, tokens), mtf.Dim("layers", layers))
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(embedding.logits(x, table), targets, v))
    return mtf.Model(loss, name="words", token_dims=(b, s))


def family(build: Any, rule: str = "both", **hparams: Any) -> Family:
    defaults = {n: d.value for n, d in defaults_of(build, "model").items() if d.given}
    return Family(build, {**defaults, **hparams}, rule)


# -- families ------------------------------------------------------------------------------------------------


def test_depth_and_width_grow_alike_and_heads_keep_their_size() -> None:
    found = family(llama3_8b).scaled(0.5)
    assert found == {"layers": 16, "heads": 16, "d_model": 2048, "d_ff": 7168}


def test_a_size_is_counted_on_the_model_that_is_built() -> None:
    own = family(llama3_8b).own
    assert own.size.total == 8_030_261_248 and own.hparams == {}
    # Untied: as many words at the end as at the beginning.
    assert own.size.total - own.size.non_embedding == 2 * 128256 * 4096


def test_learned_positions_are_no_parameters_of_the_layers() -> None:
    model = transformer(d_model=64, d_ff=256, heads=2, length=32, vocab=64)
    size = counted(model)
    assert size.total == model.parameters
    assert size.total - size.non_embedding == 2 * 64 * 64 + 32 * 64


def test_laws_count_what_a_token_uses_of_a_mixture() -> None:
    """Two of eight experts with two matrices each, in four layers."""
    size = counted(mixture())
    assert size.idle == 4 * 2 * (8 - 2) * 256 * 1024
    assert size.counted(published("besiroglu")) == size.total - size.idle
    assert size.counted(published("kaplan")) == size.non_embedding - size.idle
    assert counted(transformer()).idle == 0


def test_sizes_are_near_those_that_were_asked_for() -> None:
    wanted = [3e9, 8e9, 20e9, 70e9, 200e9]
    found = [*family(llama3_8b).sizes(wanted, lambda size: size.total)]
    assert [c.size.total for c in found] == [pytest.approx(n, rel=0.12) for n in wanted]
    assert all(c.model.parameters == c.size.total for c in found)
    shapes = [c.model.hparams or c.hparams for c in found]
    assert all(s.get("heads", 32) % 8 == 0 for s in shapes)


def test_depth_alone_and_width_alone() -> None:
    (deep,) = family(llama3_8b, "depth").sizes([16e9], lambda size: size.total)
    (wide,) = family(llama3_8b, "width").sizes([16e9], lambda size: size.total)
    assert set(deep.hparams) == {"layers"} and "layers" not in wide.hparams
    own = family(llama3_8b, "layers:1;d_ff:2").scaled(2.0)
    assert own == {"layers": 64, "d_ff": 4 * 14336}


def test_experts_keep_their_number() -> None:
    assert set(family(mixture).powers) == {"layers", "heads", "d_model", "d_ff"}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("wide", "give both, depth, width"),
        ("layers", "give both, depth, width"),
        ("layers:9", "powers above 0 and at most 4"),
        ("layres:1", "did you mean 'layers'"),
        ("", "give both, depth, width"),
    ],
)
def test_a_rule_that_is_none_is_refused(rule: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        family(transformer, rule).scaled(2.0)


def test_a_model_without_known_sizes_asks_for_powers() -> None:
    with pytest.raises(
        UserError, match=r"no hyperparameter has a known name for depth or width; give the powers by name"
    ):
        powers_of("both", {"units": 12, "rate": 0.1, "tied": True})
    assert powers_of("units:1", {"units": 12}) == {"units": 1.0}
    with pytest.raises(UserError, match="no whole-number hyperparameters"):
        powers_of("both", {"size": "small", "rate": 0.1})


def test_depth_does_not_grow_alone_where_the_width_has_another_name() -> None:
    """Nor the width; both were asked for."""
    hparams = {"layers": 6, "channels": 256}
    with pytest.raises(
        UserError,
        match="no hyperparameter has a known name for width; write --scale depth to scale only layers",
    ):
        powers_of("both", hparams)
    assert powers_of("depth", hparams) == {"layers": 1.0}
    with pytest.raises(
        UserError, match="known name for depth; write --scale width to scale only heads, d_model"
    ):
        powers_of("both", {"blocks": 6, "heads": 4, "d_model": 256})


def test_numbers_of_heads_keep_three_binary_digits() -> None:
    assert [rounded_to(x, 1) for x in (0.2, 5, 9, 13, 33, 100)] == [1, 5, 8, 12, 32, 96]
    assert [rounded_to(x, 8) for x in (5, 33, 100)] == [8, 32, 104 - 8]


# -- answers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def searches() -> Iterator[dict[Any, Plan]]:
    """What was searched here: the same search, asked for by another question, is not done again."""
    known, real = dict[Any, Plan](), timing.search

    def search(model: Model, **asked: Any) -> Plan:
        allowed = str([asked.get(name) for name in ("recompute", "context", "elsewhere", "pipeline")])
        what = (
            model.parameters,
            model.tokens,
            asked["hardware"].name,
            asked["hardware"].framework,
            asked["devices"],
            asked["memory"],
            allowed,
        )
        if what not in known:
            known[what] = real(model, **asked)
        return known[what]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "search", search)
        yield known


BUDGET: dict[str, Any] = {"budget": 1e15, "devices": 2, "candidates": 3, "price": 2.0, "law": "kaplan"}


@pytest.fixture(scope="module")
def budget() -> Sizing:
    return layoutopt.size(words, TINY, every=True, **BUDGET, **ASKED)


def test_the_best_under_a_budget_has_the_least_loss(budget: Sizing) -> None:
    law = published("kaplan")
    frame = budget.candidates
    assert len(frame) == 3 and budget.best.loss == frame["loss"].min()
    for each in budget.data.candidates:
        model = words(**{**TINY, **each.hparams})
        assert (each.parameters, each.non_embedding) == (model.parameters, counted(model).non_embedding)
        flops = sum(unsplit_flops(model).values()) / model.tokens  # type: ignore[operator]
        assert each.tokens * flops == pytest.approx(1e15)
        assert each.loss == pytest.approx(law.loss(each.non_embedding, each.tokens))


def test_time_and_money_follow_from_the_proven_layout(budget: Sizing) -> None:
    best = budget.best
    plan = layoutopt.search(budget.model, devices=2, hardware="tpu-v5e", max_axes=1, alternatives=False)
    assert plan.solver.status == best.status == "OPTIMAL"
    assert plan.predicted.step_seconds == best.step_seconds and plan.layout == budget.plan.layout
    assert best.days == pytest.approx(best.tokens / best.batch_tokens * best.step_seconds / 86400)
    assert best.chip_hours == pytest.approx(2 * 24 * best.days) and best.money == pytest.approx(
        2 * best.chip_hours
    )


def test_a_size_takes_as_long_as_cost_says_where_the_host_takes_longer() -> None:
    """Days, throughput and price are those of the same steps as MFU."""
    asked = {"hardware": "h100", "framework": "torch"}
    found = layoutopt.size(words, TINY, max_axes=1, **BUDGET | {"candidates": 1}, **asked)
    best, priced = found.best, layoutopt.cost(found.model, found.plan, **asked)
    p = priced.predicted
    assert p.host_seconds is not None and best.step_seconds == pytest.approx(p.host_seconds)
    assert (best.mfu, best.tokens_per_second) == pytest.approx((p.mfu, p.tokens_per_second))
    assert best.days == pytest.approx(best.tokens / best.tokens_per_second / 86400)
    assert f"{seconds_text(p.host_seconds)} a step" in repr(priced)


def test_the_frontier_has_the_best_and_nothing_that_another_beats(budget: Sizing) -> None:
    frontier = budget.frontier
    assert budget.best.parameters in set(frontier["parameters"])
    assert list(frontier["loss"]) != []
    for _, row in frontier.iterrows():
        better = budget.candidates[
            (budget.candidates["loss"] < row["loss"]) & (budget.candidates["days"] < row["days"])
        ]
        assert better.empty


SIZES = (6e4, 2e6)


@pytest.mark.parametrize("given", [{"budget": 1e15}, {"days": 0.002}, {"loss": 14.0}])
@pytest.mark.one_in(3)
def test_what_was_not_searched_is_beaten_and_changes_nothing(given: dict[str, float]) -> None:
    """The answer and the frontier are those of all searches, and no layout is faster than the bound."""
    asked = {**ASKED, **given, "devices": 2, "candidates": 3, "hardware": ["tpu-v5e", "tpu-v5p"]}
    every = layoutopt.size(words, TINY, sizes=SIZES, every=True, **asked).data
    found = layoutopt.size(words, TINY, sizes=SIZES, **asked).data
    assert found.beaten and not every.beaten
    assert len(found.candidates) + len(found.beaten) == len(every.candidates)
    assert (found.best, found.flat) == (every.best, every.flat)
    assert [c for c in found.candidates if c.frontier] == [c for c in every.candidates if c.frontier]
    for each in found.beaten:
        where = each.parameters, each.hardware, each.devices
        (own,) = [c for c in every.candidates if (c.parameters, c.hardware, c.devices) == where]
        least = each.step_seconds, each.days, each.chip_hours, each.loss
        known = own.step_seconds, own.days, own.chip_hours, own.loss
        assert all(low <= value * (1 + 1e-9) for low, value in zip(least, known, strict=True))  # type: ignore[operator]
        assert not own.frontier


def test_what_is_searched_after_all_is_no_longer_beaten() -> None:
    question, law = SizingQuestion(budget=1e15, devices=(2,)), Forecast(published("kaplan"))
    machines = machines_of("tpu-v5e", None)
    answering = Answering(question, law, family(words, **TINY), machines, Timer(1, Clock(None)), 1)
    row = answering._add(answering.family.own, machines[0], 2)
    assert row is not None
    answering.rows, answering.beaten = [], [row]
    again = answering._add(row.candidate, machines[0], 2, sure=True)
    assert again is not None and answering.rows == [again] and answering.beaten == []


def ended(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """From the second search on there is no time, or Ctrl-C comes."""
    real, done = timing.search, list[Plan]()

    def search(model: Model, **asked: Any) -> Plan:
        if done:
            raise error
        done.append(real(model, **asked))
        return done[0]

    monkeypatch.setattr(timing, "search", search)


def test_ctrl_c_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    ended(monkeypatch, KeyboardInterrupt)
    found = layoutopt.size(words, TINY, every=True, keep_best=True, **BUDGET, **ASKED)
    assert found.stopped and len(found.data.candidates) == 1
    assert any(note.startswith("stopped: 2 of 3 searches were not run") for note in found.data.notes)
    with pytest.raises(KeyboardInterrupt):
        layoutopt.size(words, TINY, every=True, **BUDGET, **ASKED)


def test_what_was_not_searched_in_time_is_not_called_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    ended(monkeypatch, LimitError)
    with pytest.raises(
        LimitError, match=r"none of the searched sizes ends within 1e-09 days, and some sizes"
    ):
        layoutopt.size(words, TINY, every=True, days=1e-9, **BUDGET, **ASKED)
    with pytest.raises(LimitError, match="no size was searched within the time limit"):
        layoutopt.size(words, TINY, every=True, **BUDGET, **ASKED)


def test_hardware_without_time_is_named_beside_the_recommendation(monkeypatch: pytest.MonkeyPatch) -> None:
    ended(monkeypatch, LimitError)
    asked: dict[str, Any] = {**ASKED, **BUDGET, "hardware": ["tpu-v5e", "tpu-v4"], "candidates": 1}
    found = layoutopt.size(words, TINY, every=True, **asked).data
    (left,) = found.unsearched
    assert {left, found.best.hardware} == {"tpu-v5e", "tpu-v4"}
    rows = [name for name, words in size_tables._answer(found, found.best) if left in words]
    assert rows == ["not compared"]
    monkeypatch.undo()
    ended(monkeypatch, LimitError)
    asked = {**ASKED, "tokens": 1e9, "devices": (1, 2), "candidates": 1}
    found = layoutopt.size(words, TINY, **asked).data
    assert found.unsearched == [f"{({1, 2} - {found.best.devices}).pop()} {found.best.hardware}"]


def test_rows_after_the_best_are_searched_with_everything_too(
    monkeypatch: pytest.MonkeyPatch, everything_after: None
) -> None:
    """A table in which only the best row has pipelines would compare unlike things."""
    shares = list[float]()

    def everything(self: Timer, timing: Timing, share: float) -> Timing:
        shares.append(share)
        return replace(timing, usual=False)

    monkeypatch.setattr(Timer, "everything", everything)
    found = layoutopt.size(words, TINY, every=True, **BUDGET, **ASKED).data
    assert len(shares) == len(found.candidates) > 2 and shares[-1] == 1 > shares[0]
    assert not any("usual layouts" in note for note in found.notes)
    monkeypatch.setattr(Timer, "goes_on", False)
    found = layoutopt.size(words, TINY, every=True, **BUDGET, **ASKED).data
    assert any(note.startswith(f"{len(shares)} of {len(shares)} rows") for note in found.notes)


def test_searches_of_sizes_divide_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real, limits = timing.search, list[float]()

    def search(model: Model, **asked: Any) -> Plan:
        limits.append(asked["time_limit"].limit)
        return real(model, **asked)

    monkeypatch.setattr(timing, "search", search)
    layoutopt.size(words, TINY, every=True, time_limit=90, allow="usual", **BUDGET, **ASKED)
    assert len(limits) == 3 and limits[0] <= 30 < limits[1] <= 45 < limits[2] <= 90


def test_a_model_brings_its_framework() -> None:
    def model(**hparams: Any) -> Model:
        return replace(words(**hparams), framework="torch")

    asked: dict[str, Any] = {**ASKED, **BUDGET, "hardware": "h100", "candidates": 1, "allow": "usual"}
    found = layoutopt.size(model, TINY, **asked)
    assert found.plan.data.framework == "torch"
    named = layoutopt.size(model, TINY, framework="layoutopt", **asked)
    assert named.plan.data.framework == "layoutopt"


def test_layouts_may_choose_what_a_search_may() -> None:
    asked: dict[str, Any] = {"tokens": 1e9, "devices": 2, **ASKED}
    assert layoutopt.size(words, TINY, recompute=[True], **asked).best.recompute == ["layers"]
    with pytest.raises(UserError, match="elsewhere nowhere: no operation has this dimension"):
        layoutopt.size(words, TINY, elsewhere=("nowhere",), **asked)


def test_the_question_turned_round_has_the_same_answer(budget: Sizing) -> None:
    """The loss of the best asks for its budget; its days on its devices give its tokens."""
    size = float(budget.best.parameters)
    asked: dict[str, Any] = {"devices": 2, "sizes": (size, size), "candidates": 1, "law": "kaplan", **ASKED}
    own = {**TINY, **budget.best.hparams}
    by_loss = layoutopt.size(words, own, loss=budget.best.loss, **asked)
    assert by_loss.best.flops == pytest.approx(1e15, rel=1e-6)
    by_days = layoutopt.size(words, own, days=budget.best.days, **asked)
    assert by_days.best.tokens == pytest.approx(budget.best.tokens)
    by_money = layoutopt.size(words, own, money=budget.best.money, price=2.0, **asked)
    assert by_money.best.tokens == pytest.approx(budget.best.tokens)


def test_for_a_given_size_chips_are_looked_for() -> None:
    found = layoutopt.size(words, TINY, tokens=1e9, hardware=["tpu-v5e", "tpu-v5p"], max_axes=1)
    assert {c.parameters for c in found.data.candidates} == {words(**TINY).parameters}
    assert all(c.tokens == 1e9 for c in found.data.candidates)
    assert [s.hardware for s in found.data.sweeps] == ["tpu-v5e", "tpu-v5p"]
    for sweep in found.data.sweeps:
        own = {c.devices: c.chip_hours for c in found.data.candidates if c.hardware == sweep.hardware}
        assert sweep.fits_from == 1 and sweep.pays_to is not None
        assert own[sweep.pays_to] <= 1.25 * min(own.values()) < min(own[n] for n in own if n > sweep.pays_to)
    assert found.best.devices <= max(s.pays_to or 0 for s in found.data.sweeps)


def test_a_given_size_needs_no_family() -> None:
    found = layoutopt.size(lambda: words(**TINY), tokens=1e9, devices=2, **ASKED)
    assert found.best.hparams == {} and found.data.scaled == {} and found.data.family() == ""


@pytest.mark.nightly
def test_what_does_not_fit_is_said_once() -> None:
    """It is looked at for the question, and for how many devices pay."""
    found = layoutopt.size(words, TINY, tokens=1e9, memory=4e5, **ASKED).data
    places = [(each.hardware, each.devices) for each in found.unfit]
    assert ("tpu-v5e", 1) in places and len(places) == len(set(places))


def test_sizes_are_compared_on_the_devices_that_suit_the_best() -> None:
    """Not only on the usual number, where small ones lose more."""
    found = layoutopt.size(words, TINY, money=1e-3, price=1.0, candidates=3, sizes=SIZES, **ASKED).data
    best = found.best
    here = [c for c in (*found.candidates, *found.beaten) if c.devices == best.devices]
    assert best.devices < 64 and len({c.parameters for c in here}) == 3
    assert best.loss == min(c.loss or 0.0 for c in found.candidates if c.devices == best.devices)
    near = [c.parameters for c in here if (c.loss or 0.0) <= (best.loss or 0.0) + 0.01]
    assert found.flat is not None and (found.flat.low, found.flat.high) == (min(near), max(near))


def test_a_deadline_is_met_by_the_cheapest() -> None:
    asked = {"tokens": 1e9, "devices": (1, 2), **ASKED}
    free = layoutopt.size(words, LARGER, **asked)
    days = {c.devices: float(c.days or 0.0) for c in free.data.candidates}
    assert days[1] > days[2]
    found = layoutopt.size(words, LARGER, days=days[2] * 1.01, **asked)
    assert found.best.devices == 2
    with pytest.raises(InfeasibleError, match=r"days=.*: no candidate is fast enough; the fastest, "):
        layoutopt.size(words, LARGER, days=days[2] / 2, **asked)


def test_chips_too_few_for_the_deadline_are_not_searched() -> None:
    asked: dict[str, Any] = {"tokens": 1e9, "hardware": ["tpu-v5e", "tpu-v5p"], "max_axes": 1}
    free = layoutopt.size(words, LARGER, **asked).data
    days = {(c.hardware, c.devices): float(c.days or 0.0) for c in free.candidates}
    assert ("tpu-v5p", 1) in days and not any(s.in_time for s in free.sweeps)
    found = layoutopt.size(words, LARGER, days=days["tpu-v5p", 2] * 1.01, **asked).data
    searched = {(c.hardware, c.devices) for c in (*found.candidates, *found.beaten)}
    assert ("tpu-v5p", 2) in searched and not searched & {("tpu-v5p", 1), ("tpu-v5e", 1), ("tpu-v5e", 2)}
    v5p = next(s for s in found.sweeps if s.hardware == "tpu-v5p")
    assert v5p.fits_from == 2 and v5p.in_words().startswith(
        "fits and meets the deadline, from 2 devices among the"
    )
    assert any(
        "days; the margin is smaller than the mean error of predictions for" in note for note in found.notes
    )
    assert any("compared by chip-hours" in note and "--price tpu-v5p=P" in note for note in found.notes)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "size requires a target; give budget"),
        ({"budget": 1e20, "loss": 2.0}, "budget and loss cannot be combined"),
        ({"days": 3}, "size requires a target"),
        ({"money": 1e6}, "money requires the price of a chip-hour of tpu-v5e"),
        ({"budget": float("nan")}, "budget is nan; give a positive number"),
        ({"budget": 1e20, "devices": 0}, "devices is 0; give whole numbers from 1 to"),
        ({"budget": 1e20, "devices": "64"}, "devices is '64'; give whole numbers"),
        ({"budget": 1e20, "devices": [2.5]}, "devices is 2.5; give a whole number"),
        ({"budget": "1e20"}, "budget is '1e20'; give a positive number"),
        ({"budget": 1e20, "candidates": 2.5}, "candidates is 2.5"),
        ({"budget": 1e20, "sizes": (1e6,)}, "sizes is 1e+06; give the smallest and the largest"),
        ({"budget": 1e20, "price": "4"}, "price of tpu-v5e is '4'; give a positive number"),
        ({"budget": 1e20, "unique": "1B"}, "unique is '1B'; give a positive number"),
        ({"budget": 1e20, "replicas": 1.5}, "replicas is 1.5; give a whole number"),
        ({"budget": 1e20, "inference": "1T"}, "inference is '1T'; give a positive number"),
        ({"budget": 1e20, "memory": "16GiB"}, "memory is '16GiB'; give a positive number of bytes"),
        (
            {"budget": 1e20, "characters": "four"},
            "characters is 'four'; give the number of characters per token",
        ),
        ({"budget": 1e20, "hardware": 3}, "hardware is 3; give the name of a preset"),
        ({"budget": 1e20, "hardware": []}, "size requires hardware"),
        ({"budget": 1e20, "scale": None}, "scale None is not a rule; give both, depth, width"),
        ({"budget": 1e20, "runs": 3}, "runs is 3; give a CSV file, or a data frame"),
        ({"budget": 1e20, "runs": {"N": [1.0]}}, "own runs has no column 'D'"),
        ({"budget": 1e20, "candidates": 0}, "candidates is 0"),
        ({"budget": 1e20, "law": "chinchilla"}, "law chinchilla is not a known scaling law"),
        ({"budget": 1e20, "price": {"h100": 3.0}}, "price h100=3.0: 'h100' is not among the hardware"),
        ({"budget": 1e20, "sizes": (2.0, 1.0)}, "sizes is 2:1"),
        ({"budget": 1e20, "replicas": 0}, "replicas is 0"),
    ],
)
def test_wrong_questions_are_one_line(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        layoutopt.size(words, TINY, **{**ASKED, **asked})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_no_size_can_reach_is_proven() -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"loss=1.8: no size reaches this loss, because the least loss under .* 'besiroglu'",
    ):
        layoutopt.size(words, TINY, loss=1.8, devices=2, **ASKED)
    with pytest.raises(InfeasibleError, match=r"is 2\.790 with the given data and replicas"):
        layoutopt.size(words, TINY, loss=2.5, unique=1e9, devices=2, **ASKED)
    with pytest.raises(InfeasibleError, match="less than one training step"):
        layoutopt.size(words, TINY, tokens=10, devices=2, **ASKED)


def test_a_model_without_tokens_is_refused() -> None:
    def build(batch: int = 8, width: int = 4) -> Model:
        from examples.mlp import model

        return model(batch=batch)

    with pytest.raises(UserError, match=r"does not define what a token is"):
        layoutopt.size(build, tokens=1e9, scale="width:1", **ASKED)


def test_searches_that_did_not_end_are_not_called_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on while there is time; then the answer names them."""
    asked, own = {"tokens": 1e9, "devices": (1, 2), **ASKED}, Timer.__call__
    days = {c.devices: float(c.days or 0) for c in layoutopt.size(words, LARGER, **asked).data.candidates}

    def early(self: Timer, *on: Any) -> Timing:
        timing = own(self, *on)
        assert timing.plan is not None
        half = timing.plan.solver.model_copy(update={"status": "FEASIBLE", "bound": timing.step_seconds / 9})
        plan = Plan(timing.plan.data.model_copy(update={"solver": half}))
        return replace(timing, step_seconds=2 * timing.step_seconds, plan=plan)

    monkeypatch.setattr(Timer, "__call__", early)
    assert layoutopt.size(words, LARGER, days=days[2] * 1.01, **asked).best.days == pytest.approx(days[2])
    monkeypatch.setattr(Timer, "longer", lambda self, timing: timing)
    with pytest.raises(LimitError, match=r"the search of .* on 2 tpu-v5e, .* on 1 tpu-v5e did not end"):
        layoutopt.size(words, LARGER, days=days[2] * 1.01, **asked)


def test_counts_of_whole_nodes_are_searched_where_the_batch_divides() -> None:
    asked: dict[str, Any] = {**ASKED, "tokens": 1e9, "hardware": "h100", "allow": "usual"}
    for batch, between in ((48, True), (64, False)):
        sizes = {**LARGER, "batch": batch, "length": 8192, "d_model": 2048, "d_ff": 8192}
        days = layoutopt.size(words, sizes, devices=16, **asked).best.days
        found = layoutopt.size(words, sizes, days=days, **asked).data
        assert found.best.devices == 16
        assert (24 in {c.devices for c in found.candidates}) is between
        assert any(note.endswith("--devices 16,24") for note in found.notes)
