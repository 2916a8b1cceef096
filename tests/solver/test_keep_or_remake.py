"""What is kept and what is made again, against all choices that there are."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from rhino_jax.solver.remat.model import choose
from rhino_jax.solver.remat.question import (
    OFFLOAD,
    REMAT,
    SAVE,
    Question,
    RematAnswer,
    SavedValue,
    coarse,
    evaluate,
)


def chain(rng: random.Random, length: int, *, hosts: bool = False) -> Question:
    """A chain of layers: value i is made at time i of value i - 1, and read when the
    backward pass comes by, last made first."""
    candidates = []
    for i in range(length):
        late = 2 * length - i
        uses = (late, late + 1) if rng.random() < 0.5 and i else (late,)
        candidates.append(
            SavedValue(
                bytes=rng.randint(1, 9),
                start=i + 1,
                uses=uses,
                needs=(i - 1,) if i else (),
                remat_s=rng.randint(1, 20) * 1e-3 if i else None,
                offload_s=rng.randint(1, 20) * 1e-3 if hosts else None,
                extra_bytes=rng.choice([0, 0, 2]),
                remat_bytes=rng.choice([None, None, 1]),
            )
        )
    base = [(0, 0)]
    base += [(t, rng.randint(0, 4)) for t in range(1, 2 * length + 2)]
    return Question(tuple(candidates), tuple(base), length + 1)


def best(question: Question, budget: int, words: tuple[str, ...]) -> RematAnswer | None:
    """By looking at every choice."""
    found = (
        evaluate(question, choices)
        for choices in itertools.product(words, repeat=len(question.candidates))
    )
    fitting = [a for a in found if a is not None and a.peak_bytes <= budget]
    return min(fitting, key=lambda a: a.added_s, default=None)


def check(question: Question, words: tuple[str, ...]) -> int:
    """At five budgets from what is needed least to what is needed most."""
    all_kept = evaluate(question, (SAVE,) * len(question.candidates))
    assert all_kept is not None
    most, count = all_kept.peak_bytes, 0
    for share in (0.5, 0.6, 0.7, 0.85, 1.0):
        budget = int(share * most)
        expected, found = best(question, budget, words), choose(question, budget)
        assert (found is None) == (expected is None), budget
        if found is not None and expected is not None:
            assert found.peak_bytes <= budget
            assert found.added_s == pytest.approx(expected.added_s)
            assert found.bound_s == pytest.approx(expected.added_s)
            count += 1
    return count


def test_chains_against_all_choices() -> None:
    rng = random.Random(0)
    assert sum(check(chain(rng, n), (SAVE, REMAT)) for n in (3, 5, 7, 8)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_chains_of_twelve(seed: int) -> None:
    rng = random.Random(seed)
    check(chain(rng, 12), (SAVE, REMAT))


def test_values_that_may_wait_elsewhere() -> None:
    rng = random.Random(1)
    for n in (3, 5, 6):
        check(chain(rng, n, hosts=True), (SAVE, REMAT, OFFLOAD))


def in_flight(rng: random.Random, question: Question) -> Question:
    """Some of the values are held of other micro-batches as well."""
    candidates = (
        replace(
            c,
            always_bytes=rng.randint(0, 3) * c.bytes,
            remat_bytes=rng.choice([None, 1, c.bytes + 2]),
        )
        for c in question.candidates
    )
    return replace(question, candidates=tuple(candidates))


def test_values_that_others_in_flight_hold_too() -> None:
    rng = random.Random(2)
    questions = [in_flight(rng, chain(rng, n)) for n in (3, 5, 7, 8)]
    assert sum(check(q, (SAVE, REMAT)) for q in questions) > 10
    hosted = in_flight(rng, chain(rng, 5, hosts=True))
    check(hosted, (SAVE, REMAT, OFFLOAD))


def on_links(rng: random.Random, question: Question) -> Question:
    """What waits elsewhere goes there beside other work, and is held on its way."""
    candidates = tuple(
        replace(
            c,
            sent_bytes=rng.randint(0, 1) * c.bytes,
            link_s=rng.randint(0, 9) * 1e-3,
        )
        for c in question.candidates
    )
    beside_s = rng.randint(0, 12) * 1e-3
    return replace(question, candidates=candidates, beside_s=beside_s)


def test_ways_elsewhere_that_other_work_hides() -> None:
    rng = random.Random(3)
    questions = [in_flight(rng, chain(rng, n, hosts=True)) for n in (3, 5, 6, 6)]
    words = SAVE, REMAT, OFFLOAD
    assert sum(check(on_links(rng, q), words) for q in questions) > 10
    # Nothing that is hidden costs anything; what is not, all of it.
    free = replace(questions[1].candidates[0], offload_s=0.0, link_s=1.0)
    one = Question((replace(free, uses=(9,)),), ((0, 0),), 9)
    for beside_s, expected in ((0.0, 1.0), (0.4, 0.6), (2.0, 0.0)):
        answer = evaluate(replace(one, beside_s=beside_s), (OFFLOAD,))
        assert answer is not None and answer.added_s == pytest.approx(expected)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_choices_that_fit_at_few_times_fit_at_all(most: int) -> None:
    rng = random.Random(most)
    for n in (5, 8):
        question = in_flight(rng, chain(rng, n))
        few = coarse(question, most)
        assert len({t for c in few.candidates for t in c.uses}) <= most
        choices = [*itertools.product((SAVE, REMAT), repeat=n)]
        for one in rng.sample(choices, 16):
            fine, rough = evaluate(question, one), evaluate(few, one)
            assert (fine is None) == (rough is None)
            if fine is not None and rough is not None:
                assert fine.added_s == rough.added_s
                assert fine.peak_bytes <= rough.peak_bytes


def test_values_that_only_others_need() -> None:
    """The input of a cheap op is worth keeping though nothing late reads it."""
    candidates = (
        SavedValue(bytes=4, start=1, uses=(), remat_s=10.0),
        SavedValue(bytes=8, start=2, uses=(10,), needs=(0,), remat_s=1.0),
        SavedValue(bytes=8, start=3, uses=(9,), needs=(0,), remat_s=1.0),
    )
    question = Question(candidates, ((0, 0),), 9)
    found = choose(question, 12)
    assert found is not None
    assert found.choices == (SAVE, REMAT, SAVE) or found.added_s == 1.0
    assert choose(question, 4) is None


def layered(layers: int) -> Question:
    """Equal layers, each with a large value that is cheap to make again."""
    candidates = []
    for k in range(layers):
        late = 10 * layers - 2 * k
        needs = (2 * k - 2,) if k else ()
        candidates.append(SavedValue(4, 2 * k, (late,), needs, 1.0, like=0, layer=k))
        candidates.append(
            SavedValue(16, 2 * k + 1, (late - 1,), (2 * k,), 0.1, like=1, layer=k)
        )
    return Question(tuple(candidates), ((0, 0),), 2 * layers)


def test_equal_layers_do_alike() -> None:
    """The first layers do one thing, the others another."""
    question = layered(24)
    all_kept = 24 * 20
    found = choose(question, all_kept - 10 * 16)
    assert found is not None
    large = [c == SAVE for c in found.choices[1::2]]
    assert sum(a != b for a, b in itertools.pairwise(large)) <= 1
    assert found.added_s == pytest.approx(0.1 * large.count(False))
    assert large.count(False) in (10, 11)
