"""The passes from a program to its plan, in the order in which they run.

    trace     function            → program      frontend
    inline    program             → graph        regions entered in place
    analyse   graph               → analysis     facts on every mesh
    price     analysis, mesh      → model        options, and their costs
    fold      model               → problem      repeated nodes share a choice
    recipes   problem             → problem      with the experts' choices in it
    solve     problem             → solution     one option per node
    read back solution            → plan         specs, predictions, reasons

Each is an object, so that its result can be inspected: `Watch` is called after every
pass with the form that it returned, like hooks on passes of xDSL and reductions of
cvxpy. Where no mesh is given, `price` to `solve` run for every candidate mesh.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.errors import RhinoError
from rhino_jax.frontend.trace import trace_call
from rhino_jax.model.build import build_model
from rhino_jax.planner.search import forms
from rhino_jax.planner.search.folding import fold
from rhino_jax.planner.search.read_back.assemble import assemble
from rhino_jax.planner.search.recipe_choices import with_recipes
from rhino_jax.planner.search.records import Watch
from rhino_jax.planner.search.solve_on_mesh import solve_on_mesh


P = ParamSpec("P")
Form = TypeVar("Form")

_SPENT: ContextVar[dict[str, float] | None] = ContextVar(
    "seconds of passes", default=None
)


@contextmanager
def measured_passes() -> Iterator[Mapping[str, float]]:
    """Yield pass → CPU seconds of this process, for all passes that run
    within; those of a pass that another one runs count for it alone."""
    spent = dict[str, float]()
    token = _SPENT.set(spent)
    try:
        yield spent
    finally:
        _SPENT.reset(token)


@dataclass(frozen=True, slots=True)
class Pass(Generic[P, Form]):
    """A step from a program to its plan.

    Attributes:
      name: a word or two.
      reads, gives: the names of its input and output forms.
      apply: computes the output form from the input form.
      text: prints the output form; the same on every host.
    """

    name: str
    reads: str
    gives: str
    apply: Callable[P, Form]
    text: Callable[[Form], str]

    def run(self, watch: Watch | None, *args: P.args, **kwargs: P.kwargs) -> Form:
        """Apply the pass, and show its result to `watch`."""
        spent = _SPENT.get()
        started, inner_s = time.process_time(), sum((spent or {}).values())
        form = self.apply(*args, **kwargs)
        if spent is not None:
            took_s = time.process_time() - started - (sum(spent.values()) - inner_s)
            spent[self.name] = spent.get(self.name, 0.0) + took_s
        if watch is not None:
            watch(self, form)
        return form


TRACE = Pass("trace", "function", "program", trace_call, lambda t: str(t.program))
INLINE = Pass("inline", "program", "graph", inline_regions, forms.graph_text)
ANALYSE = Pass(
    "analyse", "graph", "analysis", ProgramAnalysis.of_graph, forms.analysis_text
)
PRICE = Pass("price", "analysis", "model", build_model, forms.model_text)
FOLD = Pass("fold", "model", "problem", fold, forms.folded_text)
RECIPES = Pass("recipes", "problem", "problem", with_recipes, forms.recipes_text)
SOLVE = Pass("solve", "problem", "solution", solve_on_mesh, forms.solution_text)
READ_BACK = Pass("read back", "solution", "plan", assemble, forms.plan_text)

PASSES = (TRACE, INLINE, ANALYSE, PRICE, FOLD, RECIPES, SOLVE, READ_BACK)
"""All passes, in the order in which they run."""


class Dump:
    """Write the result of each pass to a file of its own, such as `03_price.txt`.

    Files are numbered in the order in which the passes ran. Those of an earlier run are
    overwritten where they have the same name, and nothing else is touched.

    Attributes:
      folder: the folder of the files; created if missing, but not its parents.
    """

    def __init__(self, folder: str | os.PathLike[str], what: str) -> None:
        """Create the folder.

        Args:
          folder: path of the folder.
          what: the public call, for messages.
        Raises:
          RhinoError: the folder cannot be created.
        """
        self.folder = Path(folder)
        self._what = what
        self._count = 0
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise self._failed(self.folder, error) from error

    def __call__(self, step: Pass[..., Any], form: Any) -> None:
        path = self.folder / f"{self._count:02}_{step.name.replace(' ', '_')}.txt"
        self._count += 1
        try:
            path.write_text(step.text(form) + "\n", encoding="utf-8")
        except OSError as error:
            raise self._failed(path, error) from error

    def _failed(self, path: Path, error: OSError) -> RhinoError:
        return RhinoError(
            f"{self._what}: what the passes give cannot be written.",
            where="dump=",
            numbers=f"{path}: {error.strerror}",
            fix="give a folder that can be written to.",
        )
