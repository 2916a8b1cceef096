"""The passes from a program to its plan, in the order in which they run.

    trace     function            → program      frontend
    inline    program             → graph        regions entered in place
    analyse   graph               → analysis     what holds on every mesh
    price     analysis, mesh      → model        options, and what they cost
    fold      model               → problem      repeats choose alike
    recipes   problem             → problem      with the experts' choices in it
    solve     problem             → solution     one option per node
    read back solution            → plan         specs, predictions, reasons

Each is an object, so that what comes out of it can be seen: `Watch` is called after
every pass with what it gave, as passes of xDSL and reductions of cvxpy are watched.
Where no mesh is given, `price` to `solve` run for every mesh that is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace_call
from rhino_jax.model.build import build_model
from rhino_jax.planner.search import forms
from rhino_jax.planner.search.folding.fold import fold
from rhino_jax.planner.search.read_back.assemble import assemble
from rhino_jax.planner.search.recipe_choices import with_recipes
from rhino_jax.planner.search.records import Watch
from rhino_jax.planner.search.solve_on_mesh import solve_on_mesh
from rhino_jax.solver.problem import Labels


P = ParamSpec("P")
Form = TypeVar("Form")


@dataclass(frozen=True, slots=True)
class Pass(Generic[P, Form]):
    """One step from a program to its plan.

    Attributes:
      name: a word or two.
      reads, gives: the forms before and after it.
      apply: the form after it, of the one before.
      text: that form as text; the same on every host.
      undo: a choice made in the form after it → the same choice in the form before;
        None where both have the same nodes and options, or there is no choice yet.
    """

    name: str
    reads: str
    gives: str
    apply: Callable[P, Form]
    text: Callable[[Form], str]
    undo: Callable[[Form, Labels], Labels] | None = None

    def run(self, watch: Watch | None, *args: P.args, **kwargs: P.kwargs) -> Form:
        """Apply it, and show what it gave."""
        form = self.apply(*args, **kwargs)
        if watch is not None:
            watch(self, form)
        return form


TRACE = Pass("trace", "function", "program", trace_call, lambda t: str(t.program))
INLINE = Pass("inline", "program", "graph", inline_regions, forms.graph_text)
ANALYSE = Pass(
    "analyse", "graph", "analysis", ProgramAnalysis.of_graph, forms.analysis_text
)
PRICE = Pass("price", "analysis", "model", build_model, forms.model_text)
FOLD = Pass(
    "fold",
    "model",
    "problem",
    fold,
    forms.folded_text,
    undo=lambda problem, labels: problem.symmetry.expand(labels),
)
RECIPES = Pass("recipes", "problem", "problem", with_recipes, forms.recipes_text)
SOLVE = Pass("solve", "problem", "solution", solve_on_mesh, forms.solution_text)
READ_BACK = Pass("read back", "solution", "plan", assemble, forms.plan_text)

PASSES = (TRACE, INLINE, ANALYSE, PRICE, FOLD, RECIPES, SOLVE, READ_BACK)
"""In the order in which they run."""
