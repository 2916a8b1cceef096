"""Limits of the search: what it leaves out, and where it stops."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.solver.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Limits of the search.

    Attributes:
      most_meshes: maximum number of meshes whose models are retained, as candidates for
        the compiler.
      node_s: cost of a search per node, in seconds on one core, at level "best" and
        unfolded. With `cell_s` it fits the time of 21 models on meshes of one to three
        axes (57 problems, 21 of them of `bench.holdout`), to a factor of 1.7 in the
        geometric mean and of 5.5 at worst.
      cell_s: cost of a search per pair of options of two neighbours, in seconds.
      unfolded_s: a problem whose search takes no longer than this, in seconds, is not
        folded: people do not mind a second (Nielsen, Usability Engineering, 1993,
        chapter 5).
      another_axis_s: cost of a mesh with one more axis per pair of options of the
        folded problem with one fewer, in seconds on one core, at level "fast": the
        median of 23 models from a third axis, of 0.8e-6 to 8e-6; pairs become 7 to 25
        times as many.
      meshes_s: seconds that meshes of three and more axes may take by that estimate,
        where no mesh is given and time is not limited: after ten, people turn to
        something else (same source).
      meshes_share: share of the time limit that they may take where there is one; the
        best of them is then searched to the end.
      second_axis_gain: share of the step time that meshes of two axes must have gained
        over those of one: less than the three digits of tables tell.
      axis_gain: share of the step time that meshes of one more axis must have gained
        over those of two or more, before one of them is chosen, or meshes of yet
        another axis are tried. GPT 7B on 1,024 H100 gained 0.4 % by a third axis in the
        comparison; searched to the end, with its variants, the mesh of two is 2 %
        faster, and takes a fifth of the time.
      recipes_share: share of the remaining time that recipes may take, where time is
        limited. The search starts from them, and finds plans that they exclude.
      prediction_error: error of the ratio of two plans' predicted step times against
        the ratio of their compiled ones: plans whose predicted step is further than
        this above the best one's are not compiled for comparison.
      brief_error: share by which the excess of local search over full search may differ
        between meshes of a program: of seven models on 2 to 6 meshes each, up to 1.5 %
        on those that were within 3 % of the best. Two full searches of one mesh, from
        other starts, differ by up to 3 % (`Effort.near`): by 2.3 % for moe-tiny on
        v5e:4x4, whose best mesh is found.
      arithmetic_share: share of an op's seconds from which on its arithmetic is said to
        be all of them: padding and rates are rounded.
      communication_weights: factors on the cost of communication, under which the
        runners-up are searched for the compiler to compare.
      most_pins: maximum number of pins that are dropped one by one to find those that
        prevent a plan from fitting; each costs a search for the smallest peak.
      minimum_axes: maximum number of axes of the meshes on which the smallest peak is
        searched for, where several may be taken: those of more axes hold as little
        where dims divide, and their options take ten times as long to enumerate.
      unlike_gain: share by which repeated nodes that choose differently must be able to
        lower the smallest peak: they are then searched unfolded, in ten times the time.
      loop_parts: number of parts into which the slices of a loop's stacked residuals
        are divided; the first parts may be saved and the others recomputed.
      late_times: number of times of backward tasks that are told apart in the choice of
        what a stage recomputes: values recomputed between two of them count as live at
        once.
      most_visited: maximum number of values visited to find the update that a gradient
        is for; a gradient farther away is not named after its parameter.
    """

    most_meshes: int = 3
    node_s: float = 3.4e-4
    cell_s: float = 3.5e-7
    unfolded_s: float = 1.0
    another_axis_s: float = 2.1e-6
    meshes_s: float = 10.0
    meshes_share: float = 0.5
    second_axis_gain: float = 0.001
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
        """Ratio of a recipe's step time to the best recipe's so far beyond which it is
        not searched to the end: it would not be compiled, only be listed in the plan's
        table, with a step that is not the smallest of that recipe."""
        return 1 + self.prediction_error

    def search_s(self, problem: Problem) -> float:
        """Return the estimated seconds of a search of a problem on one core."""
        cells = sum(edge.table.size for edge in problem.edges)
        return self.node_s * len(problem.costs) + self.cell_s * cells


LIMITS = SearchLimits()
