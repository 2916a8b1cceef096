"""Bubbles and memory of named schedules, against formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.memory import in_flight
from rhino_jax.pipeline.schedules.family import FAMILIES, family
from rhino_jax.pipeline.schedules.searched import fastest, make, search
from rhino_jax.pipeline.simulator import checked, simulate
from rhino_jax.pipeline.tasks import LETTERS, Schedule, TransferLink
from rhino_jax.pipeline.work import StepWork
from rhino_jax.plan.stages import StageCost
from rhino_jax.planner.staging.schedules import compare, may_split, placements
from tests.pipeline.chains import chain


SIZES = [(1, 1), (1, 5), (2, 2), (2, 7), (3, 4), (4, 4), (4, 8), (8, 32)]
"""Stages and micro-batches; m >= S."""

COST = StageCost(forward_s=1, backward_s=2, activation_bytes=1)


def bubble(name: str, work: StepWork, **options: int) -> float:
    return simulate(make(name, work, **options)).bubble


def equal(stages: int, m: int, v: int = 1, *, is_v: bool = False) -> StepWork:
    """S v chunks alike, in S groups."""
    return chain([COST] * (stages * v), m, groups=stages, is_v=is_v)


@pytest.mark.parametrize(("stages", "m"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_is_exactly_that_of_the_formula(name: str, stages: int, m: int) -> None:
    assert bubble(name, equal(stages, m)) == (stages - 1) / (m + stages - 1)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_few_micro_batches_have_the_same_bubble(m: int) -> None:
    for name in ("gpipe", "1f1b", "kfkb"):
        options = {"k": m} if name == "kfkb" else {}
        assert bubble(name, equal(4, m), **options) == 3 / (m + 3)


@pytest.mark.parametrize(("stages", "m"), SIZES)
def test_1f1b_holds_s_minus_s_micro_batches(stages: int, m: int) -> None:
    schedule = make("1f1b", equal(stages, m))
    expected = tuple(min(m, stages - s) for s in range(stages))
    assert in_flight(schedule) == expected
    assert simulate(schedule).group_peak_bytes == expected


@pytest.mark.parametrize(("stages", "m"), SIZES)
def test_gpipe_holds_all_micro_batches(stages: int, m: int) -> None:
    schedule = make("gpipe", equal(stages, m))
    assert in_flight(schedule) == (m,) * stages
    assert simulate(schedule).group_peak_bytes == (m,) * stages


@pytest.mark.parametrize(
    ("stages", "m", "v"), [(2, 2, 2), (2, 8, 3), (4, 4, 2), (4, 8, 2), (4, 16, 4)]
)
def test_interleaved_divides_the_bubble(stages: int, m: int, v: int) -> None:
    """Chunks of a v-th of the work: (S - 1) / (v m + S - 1)."""
    found = bubble("interleaved", equal(stages, m, v))
    assert found == (stages - 1) / (v * m + stages - 1)
    assert found < bubble("1f1b", equal(stages, m))


def test_interleaved_is_the_order_of_its_paper() -> None:
    """Figure 4 of arXiv 2104.04473: the last of 4 devices with 2 chunks each."""
    schedule = make("interleaved", equal(4, 8, 2))
    tasks = [schedule.graph.tasks[i] for i in schedule.orders[3]]
    words = " ".join(f"{LETTERS[t.kind]}{t.micro_batch}.{t.chunk // 4}" for t in tasks)
    assert words.startswith(
        "F0.0 F1.0 F2.0 F3.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4.0 B0.0"
    )


@pytest.mark.parametrize(("stages", "m"), [s for s in SIZES if s[0] > 1])
def test_zero_bubble_is_exactly_that_of_its_paper(stages: int, m: int) -> None:
    """(S - 1) (F + I - W) beside m (F + I + W), with F = I = W."""
    schedule = make("zero-bubble", equal(stages, m))
    found = simulate(schedule)
    assert found.bubble == (stages - 1) / (3 * m + stages - 1)
    assert found.bubble < bubble("1f1b", equal(stages, m))
    # As much memory as the first stage of 1F1B.
    assert max(in_flight(schedule)) <= min(m, stages)


@pytest.mark.parametrize("times", [(2, 3, 1), (2, 2, 1), (3, 2, 2)])
def test_zero_bubble_of_unequal_halves(times: tuple[int, int, int]) -> None:
    f, i, w = times
    cost = StageCost(forward_s=f, backward_s=i, weights_s=w)
    found = simulate(make("zero-bubble", chain([cost] * 4, 8)))
    assert found.step_time_s == 8 * (f + i + w) + 3 * (f + i - w)


@pytest.mark.parametrize(("stages", "m"), [(4, 8), (4, 12), (8, 16), (8, 32)])
def test_zero_bubble_v_idles_only_at_its_start(stages: int, m: int) -> None:
    """Group s waits for s forward passes, and then for nothing."""
    found = simulate(make("zero-bubble-v", equal(stages, m, 2, is_v=True)))
    assert found.step_time_s == 6 * m + stages - 1
    assert found.bubble < bubble("zero-bubble", equal(stages, m))
    assert max(found.group_peak_bytes) <= 2 * stages


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_kfkb_holds_k_times_as_much(k: int) -> None:
    schedule = make("kfkb", equal(4, 8), k=k)
    assert in_flight(schedule) == tuple(min(8, k * (4 - s)) for s in range(4))
    assert simulate(schedule).bubble == 3 / 11


def test_kfkb_hides_transfers() -> None:
    """A second micro-batch in turn runs while the first is sent."""
    work = chain([COST] * 4, 16, sent_bytes=1, link=TransferLink("", 2.0))
    one, two = (simulate(make("kfkb", work, k=k)).step_time_s for k in (1, 2))
    assert one == simulate(make("1f1b", work)).step_time_s
    assert two < 0.85 * one


def test_token_slices_shrink_the_bubble() -> None:
    """m micro-batches of n slices are m n that run through."""
    quarter = StageCost(forward_s=1, backward_s=2)
    sliced = chain([[quarter] * 4] * 6, 2)
    assert bubble("token-slices", sliced) == 5 / (2 * 4 + 5)
    assert bubble("1f1b", equal(6, 2)) == 5 / (2 + 5)


def test_forward_only_has_no_backward_pass() -> None:
    found = simulate(make("forward-only", equal(4, 8)))
    assert found.bubble == 3 / 11
    assert len(found.schedule.graph.tasks) == 32
    round_trip = simulate(make("forward-only", equal(4, 8, 2)))
    assert round_trip.bubble == 3 / (16 + 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs_uneven_stages(name: str) -> None:
    rng = range(1, 9)
    costs = [StageCost(forward_s=k, backward_s=3 * k % 7 + 1) for k in rng]
    if name in ("interleaved", "zero-bubble-v"):
        work = chain(costs, 8, groups=4, is_v=name == "zero-bubble-v")
    elif name == "token-slices":
        work = chain([[c, replace(c, forward_s=5)] for c in costs], 3)
    else:
        work = chain(costs, 5)
    schedule = make(name, work)
    assert checked(schedule) is schedule
    assert schedule.name == name
    assert simulate(schedule).step_time_s >= max(simulate(schedule).busy_s)


@pytest.mark.parametrize(
    ("name", "work", "options", "fix"),
    [
        ("1f1b", equal(2, 4, 2), {}, "interleaved"),
        ("zero-bubble", equal(2, 4, 2), {}, "one chunk each"),
        ("interleaved", equal(4, 8), {}, "multiple of 4 chunks"),
        ("interleaved", equal(4, 6, 2), {}, "8 micro-batches or 4"),
        ("interleaved", equal(4, 3, 2), {}, "take 4 micro-batches\\."),
        ("zero-bubble-v", equal(4, 8, 2), {}, "0 … S-1, S-1 … 0"),
        ("token-slices", equal(4, 8), {}, "gpipe"),
        ("kfkb", equal(4, 8), {"k": 9}, "from 1 to 8"),
    ],
)
def test_stages_that_a_family_is_not_for(
    name: str, work: StepWork, options: dict, fix: str
) -> None:
    with pytest.raises(ScheduleError, match=fix):
        make(name, work, **options)


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ScheduleError, match="Did you mean 'interleaved'"):
        make("interleave", equal(2, 2))


def test_the_fastest_that_fits_is_taken() -> None:
    assert fastest(equal(4, 8)).schedule.name == "zero-bubble"
    tight = replace(equal(4, 8), limit_bytes=(4, 3, 2, 1))
    assert fastest(tight).schedule.name == "1f1b"
    with pytest.raises(ScheduleError, match="does not fit"):
        fastest(replace(tight, limit_bytes=(3, 3, 2, 1)))


def test_a_schedule_prints_its_orders() -> None:
    schedule: Schedule = make("1f1b", equal(2, 3))
    assert str(schedule) == "0: F0 F1 B0 F2 B1 B2\n1: F0 B0 F1 B1 F2 B2"


def test_families_say_what_they_are() -> None:
    assert all(f.name == name and f.summary for name, f in FAMILIES.items())


def test_a_family_that_is_registered_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @family("test-lifo", "the last micro-batch first")
    def lifo(work: StepWork) -> Schedule:
        return replace(make("gpipe", work), name="test-lifo")

    mine = FAMILIES.pop("test-lifo")
    monkeypatch.setitem(FAMILIES, "test-lifo", mine)
    names = {candidate.name for candidate in compare([equal(2, 4)], "auto")}
    assert names >= {"gpipe", "1f1b", "kfkb", "zero-bubble", "searched", "test-lifo"}
    assert placements("test-lifo", 2) == [(0, 1)]
    assert not may_split("test-lifo")
    assert "test-lifo" in {c.name for c in search(equal(2, 4), effort=0).tried}
    both = {candidate.name for candidate in compare([equal(2, 4, 2)], "auto")}
    assert both == {"interleaved", "searched"}
