"""How far the search goes: what it leaves out, and where it stops."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.solver.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Attributes:
    most_meshes: meshes whose models are kept, as candidates for the compiler.
    node_s: what a search takes per node, in seconds on one core, at `best` and
        unfolded. With `cell_s` it is what 21 models took on meshes of one to three axes
        (57 problems, 21 of them of `bench.holdout`), to a factor of 1.7 in the
        geometric mean and of 5.5 at worst.
    cell_s: what it takes per pair of options of two neighbours.
    unfolded_s: a problem whose search takes no longer is not folded: people do not
        mind a second (Nielsen, Usability Engineering, 1993, chapter 5).
    another_axis_s: what a mesh of another axis takes per pair of options of the folded
        problem with one fewer, in seconds on one core, at `fast`: the median of 23
        models from a third axis, of 0.8e-6 to 8e-6; pairs become 7 to 25 times as many.
    meshes_s: seconds that meshes of three and more axes may take so, where none is
        asked for and time is not limited: after ten, people turn to something else
        (as above).
    meshes_share: share of the time limit that they may take where there is one; the
        best of them is then searched to the end.
    axis_gain: share of the step that meshes of one more axis must have gained over
        those of fewer, before meshes of yet another axis are tried.
    recipes_share: share of the time left that may go into recipes, where time is
        limited. The search starts from them, and finds plans that they exclude.
    prediction_error: how far the ratio of two plans' predicted steps may be from that
        of what the compiler makes of them: plans whose predicted step is further than
        this above the best one's are not compiled to compare them.
    brief_error: share by which what a climb adds to the step that a search finds may
        differ between meshes of a program: of seven models on 2 to 6 meshes each, up to
        1.5 % on those that were within 3 % of the best (see `compare`).
    arithmetic_share: share of an op's seconds from which on its arithmetic is said to
        be all of them: padding and rates are rounded.
    communication_weights: factors on the price of communication, with which the plans
        beside the best are searched that the compiler is asked about.
    most_pins: pins that are dropped one by one to say which is in the way; each costs
        a search for the smallest peak.
    minimum_axes: axes of the meshes on which the least memory is searched for, where
        several may be taken: those of more hold as little where dims divide, and their
        options take ten times as long to enumerate.
    unlike_gain: share by which repeats that choose differently must be able to lower
        the smallest peak: they are then searched one by one, in ten times the time.
    loop_parts: into how many parts the slices of a loop's stacks are divided, of which
        the first ones may be kept and the others made again.
    late_times: times of backward tasks that are told apart where what a stage makes
        again is chosen: what is made between two of them is taken to be in memory at
        once.
    most_visited: values looked at to find the update that a gradient is for; one that
        is farther away is not named after its parameter.
    """

    most_meshes: int = 3
    node_s: float = 3.4e-4
    cell_s: float = 3.5e-7
    unfolded_s: float = 1.0
    another_axis_s: float = 2.1e-6
    meshes_s: float = 10.0
    meshes_share: float = 0.5
    axis_gain: float = 0.01
    recipes_share: float = 0.4
    prediction_error: float = 0.3
    brief_error: float = 0.03
    arithmetic_share: float = 0.99
    communication_weights: tuple[float, ...] = (2.0, 0.5)
    most_pins: int = 8
    minimum_axes: int = 2
    unlike_gain: float = 0.01
    loop_parts: int = 8
    late_times: int = 12
    most_visited: int = 64

    @property
    def recipe_worth(self) -> float:
        """A recipe is not searched to the end once its plan is this many times as slow
        as the best recipe's so far: it would not be compiled, only stand in the plan's
        table, with a step that is no recipe's least."""
        return 1 + self.prediction_error

    def search_s(self, problem: Problem) -> float:
        """About what a search of a problem takes, in seconds on one core."""
        cells = sum(edge.table.size for edge in problem.edges)
        return self.node_s * len(problem.costs) + self.cell_s * cells


LIMITS = SearchLimits()
