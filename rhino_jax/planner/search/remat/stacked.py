"""Choice of the residuals that loops stack for the backward pass where stacking costs
time, whether or not memory suffices: where stacks are copied from loop to loop."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rhino_jax.planner.search.records import SolvedMesh
from rhino_jax.planner.search.remat.candidates import candidates_of
from rhino_jax.planner.search.remat.choice import SOME, Chosen, choice_of
from rhino_jax.planner.search.remat.policies import NOTHING_SAVED, whole
from rhino_jax.planner.search.remat.rows import RematQuestion
from rhino_jax.solver.remat.model import choose
from rhino_jax.solver.remat.question import SAVE, Question, RematAnswer, evaluate


@dataclass(frozen=True, slots=True)
class Stacking:
    """Choices of the residuals that the loops of a planned step stack.

    Attributes:
      asked: the remat problem; saving a stacked residual costs no time in it.
      ordered: see `RematChoice`.
    """

    asked: RematQuestion
    ordered: bool

    @classmethod
    def of(cls, solved: SolvedMesh) -> Stacking:
        """Return the choices of a planned step.

        Args:
          solved: the step, with all residuals saved.
        """
        problem, labels = solved.mesh_problem, solved.solution.labels
        assert labels is not None, "there is no plan to change"
        asked = candidates_of(problem.model, labels, problem.symmetry)
        asked = replace(asked, question=_kept_at(asked, 0.0))
        device = problem.model.analysis.target.device
        return cls(asked, device.defers_gradients)

    def all_kept(self) -> Chosen | None:
        """Return the choice that saves all residuals, as the step does."""
        question = self.asked.question
        answer = evaluate(question, (SAVE,) * len(question.candidates))
        return None if answer is None else self._chosen("no remat", answer)

    def nothing_saved(self) -> Chosen | None:
        """Return the choice that saves the layers' inputs, as `jax.checkpoint` does."""
        answer = whole(self.asked, NOTHING_SAVED)
        return None if answer is None else self._chosen(NOTHING_SAVED, answer)

    def cheapest(
        self, per_byte_s: float, budget_bytes: float, seconds: float
    ) -> Chosen | None:
        """Return the cheapest choice; None where none is found.

        Args:
          per_byte_s: cost of each stacked byte in seconds.
          budget_bytes: the memory budget at every time.
          seconds: time limit of the search.
        """
        of = _kept_at(self.asked, per_byte_s)
        answer = choose(of, int(budget_bytes), seconds=seconds)
        return None if answer is None else self._chosen(SOME, answer)

    def stacked_bytes(self, chosen: Chosen) -> int:
        """Return the bytes that loops stack."""
        pairs = zip(self.asked.question.candidates, chosen.answer.choices, strict=True)
        stacks = _stacks(self.asked)
        return sum(
            c.bytes for i, (c, what) in enumerate(pairs) if i in stacks and what == SAVE
        )

    def _chosen(self, name: str, answer: RematAnswer) -> Chosen:
        choice = choice_of(self.asked, answer)
        if choice.recompute:
            choice = replace(choice, ordered=self.ordered)
        return Chosen(name, choice, answer)


def _stacks(asked: RematQuestion) -> set[int]:
    return {i for _, members in asked.loops.values() for i in members}


def _kept_at(asked: RematQuestion, per_byte_s: float) -> Question:
    """Return the remat problem in which a stacked byte costs `per_byte_s` seconds."""
    stacks = _stacks(asked)
    candidates = tuple(
        replace(c, save_s=c.bytes * per_byte_s) if i in stacks else c
        for i, c in enumerate(asked.question.candidates)
    )
    return replace(asked.question, candidates=candidates)
