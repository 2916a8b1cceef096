"""Run of all configurations of a sweep, group by group, with progress."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from rhino_jax.frontend.trace import Traced
from rhino_jax.sweep.answers import SearchOutcome
from rhino_jax.sweep.configs import SweepConfig
from rhino_jax.sweep.evaluate import Evaluator, refused
from rhino_jax.sweep.pending import Pending
from rhino_jax.sweep.point import Point
from rhino_jax.sweep.searching import Searching
from rhino_jax.sweep.table import best_of
from rhino_jax.sweep.whole import BudgetSweep
from rhino_jax.sweep.work import Started, SweepWork


Told = Callable[[int, int, Point | None], None]


class SweepRun:
    """A sweep in progress.

    Args:
      evaluator: evaluates groups of configurations.
      configs: the configurations.
      tell: called with the number of points done, of all, and the best point so far.
    """

    def __init__(
        self, evaluator: Evaluator, configs: Sequence[SweepConfig], tell: Told
    ) -> None:
        self._evaluator, self._configs, self._tell = evaluator, configs, tell
        of_group: dict[Hashable, list[int]] = {}
        for i, config in enumerate(configs):
            of_group.setdefault(evaluator.group(config), []).append(i)
        self._groups = list(of_group.values())
        self._found: dict[int, Point] = {}
        self._pending: dict[int, Pending] = {}
        self._best: Point | None = None
        self._planned = 0

    def points(
        self,
        traced_for: Callable[[int | None], Traced],
        workers: int | None,
        started: Started,
    ) -> tuple[list[Point], SweepWork]:
        """Return a point for every configuration, and the work of the sweep.

        Configurations of a group are searched together.

        Args:
          traced_for: batch size → the function; None: as it was called.
          workers: as in `sweep`.
          started: start of the sweep.
        """
        programs: dict[int | None, Traced] = {}
        with Searching(self._evaluator.meshes, workers, len(self._groups)) as searching:
            for key, members in enumerate(self._groups):
                group = [self._configs[i] for i in members]
                size = group[0].batch
                if size not in programs:
                    programs[size] = traced_for(size)
                begun = self._evaluator.begin(programs[size], group)
                if isinstance(begun, Pending):
                    if isinstance(begun.asked, BudgetSweep):
                        self._planned += len(group)
                    self._pending[key] = begun
                    searching.ask(key, begun)
                else:
                    self._take(key, begun)
                self._take_all(searching.answers())
            self._take_all(searching.answers(all_of_them=True))
        work = SweepWork(
            configurations=len(self._configs),
            groups=len(self._groups),
            planned=self._planned,
            counts=self._evaluator.meshes.counts + searching.counts,
            processes=searching.processes,
            cpu_s=started.cpu_s() + searching.cpu_s,
            seconds=started.seconds(),
        )
        return [self._found[i] for i in range(len(self._configs))], work

    def _take_all(self, answers: Iterable[tuple[int, SearchOutcome]]) -> None:
        for key, answer in answers:
            pending = self._pending.pop(key)
            if answer.refused:
                self._take(key, refused(pending.group, answer.refused))
            else:
                self._take(key, self._evaluator.end(pending, answer))

    def _take(self, key: int, points: Sequence[Point]) -> None:
        self._found.update(zip(self._groups[key], points, strict=True))
        self._best = best_of([*points, *([self._best] if self._best else [])])
        self._tell(len(self._found), len(self._configs), self._best)
