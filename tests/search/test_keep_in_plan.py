"""Plan, choose what to make again, write the step anew, plan again."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from rhino_jax import models
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.ir.transform import Transform
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.passes import SOLVE
from rhino_jax.planner.search.records import LIMITS, Request, SolvedMesh
from rhino_jax.planner.search.remat.candidates import ResidualReader, candidates_of
from rhino_jax.planner.search.remat.choice import (
    POLICIES,
    SOME,
    RematQuestion,
    ask,
    variants,
)
from rhino_jax.solver.incumbents import EFFORTS
from rhino_jax.solver.remat import model as choosing
from rhino_jax.solver.remat.question import RematAnswer
from tests.cases import covering


SIZES = {
    "d_model": 256, "d_ff": 1024, "num_heads": 4, "seq_len": 256, "batch": 32,
    "vocab": 1024, "dtype": "bfloat16",
}  # fmt: skip


V5E = load_target("v5e")


def step(layers: str, count: int) -> Traced:
    """A small GPT's step, without jax.checkpoint."""
    work = models.get("gpt-tiny", layers=layers, remat=False, num_layers=count, **SIZES)
    args = work.abstract_args()
    return trace(work.step, args, {}, donate_argnums=work.donate_argnums)


def solved(traced: Traced, target: Target = V5E) -> SolvedMesh:
    """Its plan on four chips, whatever it holds."""
    request = Request(1e15, {}, {}, level="fast")
    analysis = ProgramAnalysis.of(traced.program, target)
    problem = build_mesh_problem(analysis, (("x", 4),), request)
    return SOLVE.run(None, problem, EFFORTS["fast"], request)


def peak(found: SolvedMesh) -> float:
    """Predicted bytes of one device."""
    labels = found.solution.labels
    assert labels is not None
    return found.mesh_problem.model.problem.peak(labels)


def recompute_choice(
    solved: SolvedMesh, budget_bytes: float, *, effort: float = 15.0
) -> tuple[RematChoice, RematAnswer] | None:
    """Return the cheapest choice; None where nothing is to be changed, or fits."""
    found = ask(candidates_of(solved), budget_bytes, effort=effort)
    return (found[0].choice, found[0].answer) if found else None


@cache
def solved_step(layers: str, count: int) -> SolvedMesh:
    return solved(step(layers, count))


@pytest.mark.parametrize(("layers", "count"), covering([("scan", 4), ("unroll", 4)]))
def test_a_plan_that_does_not_fit_is_made_to(layers: str, count: int) -> None:
    traced, before = step(layers, count), solved_step(layers, count)
    budget = 0.7 * peak(before)
    found = recompute_choice(before, budget)
    assert found is not None
    choice, answer = found
    assert answer.added_s > 0 and choice.recompute
    assert answer.peak_bytes <= budget
    assert answer.bound_s == pytest.approx(answer.added_s, rel=1e-3)
    found = apply_passes(traced, [Transform("recompute", 0, 0, str(choice))])
    assert peak(solved(found)) <= 1.1 * budget


@pytest.fixture
def keeping_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if stacks cost no time to write and to read."""
    monkeypatch.setattr(ResidualReader, "_pass_s", lambda self, stack: 0.0)


def test_what_is_cheaper_made_again_is_not_kept() -> None:
    """Stacks of what stays in registers cost two passes through memory."""
    found = solved_step("scan", 4)
    kept = candidates_of(found).all_saved
    chosen = recompute_choice(found, 1e15)
    assert chosen is not None
    assert chosen[1].added_s < kept.added_s
    assert chosen[0].recompute


@pytest.mark.usefixtures("keeping_is_free")
def test_nothing_is_made_again_where_all_fits() -> None:
    assert recompute_choice(solved_step("scan", 4), 1e15) is None


def test_nothing_fits_in_nothing() -> None:
    forward = trace(lambda x, w: (x @ w).sum(), (np.ones((8, 8)), np.ones((8, 8))), {})
    assert recompute_choice(solved(forward), 1.0) is None
    assert recompute_choice(solved_step("scan", 4), 1e6, effort=2.5) is None


@pytest.mark.usefixtures("keeping_is_free")
def test_some_layers_keep_all() -> None:
    before = solved_step("scan", 8)
    found = recompute_choice(before, 0.9 * peak(before))
    assert found is not None
    ((_, count),) = found[0].first
    assert 0 < count < 8
    assert found[1].peak_bytes <= 0.9 * peak(before)


@pytest.mark.parametrize(("layers", "count"), [("unroll", 2), ("scan", 4)])
def test_all_kept_holds_what_the_plan_holds(layers: str, count: int) -> None:
    found = solved_step(layers, count)
    kept = candidates_of(found).all_saved
    assert kept.peak_bytes == pytest.approx(peak(found), rel=0.02)


def test_policies_are_choices_by_name() -> None:
    """What repeats more holds less; none costs less than what the engine finds."""
    before = solved_step("scan", 4)
    asked = candidates_of(before)
    weights = _smallest(asked, "products of weights saved")
    nothing = _smallest(asked, "nothing saved")
    assert nothing.peak_bytes < weights.peak_bytes < peak(before)
    chosen = ask(asked, 1.05 * weights.peak_bytes)
    assert chosen[0].name == SOME
    assert {c.name.split(",")[0] for c in chosen[1:]} <= set(POLICIES)
    assert all(c.answer.peak_bytes <= 1.05 * weights.peak_bytes for c in chosen)
    assert min(c.answer.added_s for c in chosen) == chosen[0].answer.added_s


def _smallest(asked: RematQuestion, name: str) -> RematAnswer:
    answers = (c.answer for c in variants(asked, name))
    return min(answers, key=lambda a: a.peak_bytes)


def test_policies_know_layers_that_are_unrolled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the engine gives no answer, they do: the first layers may keep all."""
    monkeypatch.setattr(choosing, "MAX_VARIABLES", 0)
    monkeypatch.setattr(LIMITS.__class__, "search_s", lambda self, problem: 1e9)
    # What the last layers save would stay on the chip: they would not be as the others.
    before = solved(step("unroll", 4), V5E.replace(on_chip_bytes=0))
    assert not before.mesh_problem.symmetry.is_identity
    every = ask(candidates_of(before), 0.8 * peak(before))
    assert every and all(c.name != SOME for c in every)
    assert all(c.answer.peak_bytes <= 0.8 * peak(before) for c in every)
