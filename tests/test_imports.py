"""Imports run one way: read from the source, where nothing has to be imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.helpers_source import PACKAGE as ROOT, TESTS, parsed


ORDER = (
    "errors", "units", "version", "utils", "_compat",
    "ir", "solver", "contest", "hardware", "cost", "frontend", "rewrite",
    "attention", "analysis", "passes", "model", "recipes", "plan", "pipeline",
    "planner.search",
    "runtime.processes", "runtime", "export", "explain.report", "verify", "planner",
    "explain", "options", "sweep", "api", "rhino_jax", "models", "bench",
    "commands", "cli", "__main__",
)  # fmt: skip
"""Packages, and modules of the top level, each after all that it imports. A package
that is named with its parent has a place of its own."""

MAY_IMPORT: Mapping[str, str] = {
    "ir": "",
    "solver": "errors utils",
    "contest": "errors solver",
    "hardware": "errors utils _compat ir",
    "cost": "ir hardware",
    "frontend": "errors utils _compat ir",
    "rewrite": "errors utils _compat ir frontend",
    "attention": "errors _compat ir frontend",
    "passes": "errors utils _compat ir frontend rewrite attention analysis",
    "plan": "errors units version utils ir cost hardware",
    "pipeline": "errors units utils ir cost passes plan",
    "export": "errors _compat ir hardware frontend passes analysis plan runtime",
    "explain.report": "errors units ir plan pipeline",
    "models": "errors utils hardware frontend",
}
"""What these packages may import and no more, where the order alone would allow it."""

AT_START = "needs OR-Tools, 0.3 s: no use to who runs plans that are kept or saved"
ALONG = "0.03 s, needed together with the search alone"
CP_SAT = "imports pandas, 0.5 s, and 2 s without bytecode: of use where memory binds"
OPTAX = "needs Optax, 0.1 s: no use to `--help` and to commands on saved plans"

INSIDE_FUNCTIONS: Mapping[tuple[str, str], str] = {
    ("planner.options", "planner.search"): AT_START,
    ("planner.options", "planner.searched"): AT_START,
    ("planner.options", "planner.variant_search"): AT_START,
    ("planner.origin", "planner.variant_search"): AT_START,
    ("explain.plan", "explain.questions"): AT_START,
    ("explain.diff", "explain.questions"): AT_START,
    ("planner.origin", "planner.cuts"): AT_START,
    ("planner.origin", "planner.staging.fitted"): AT_START,
    ("planner.origin", "planner.staging.spmd_pipeline"): AT_START,
    ("planner.joint", "planner.search"): AT_START,
    (
        "runtime.ops_on_shards",
        "runtime.grouped",
    ): "Pallas takes half a second to import",
    ("sweep.sweep", "sweep.evaluate"): AT_START,
    ("sweep.sweep", "sweep.running"): AT_START,
    ("pipeline.cut.choose", "pipeline.cut.best"): AT_START,
    ("pipeline.schedules.searched", "pipeline.schedules.cpsat"): AT_START,
    ("planner.joint", "analysis"): ALONG,
    ("planner.joint", "solver"): AT_START,
    ("planner.search.remat.choice", "solver.remat.model"): CP_SAT,
    ("export.code", "analysis.dim_classes"): ALONG,
    ("export.code", "analysis.inline_regions"): ALONG,
    ("export.code", "analysis.roles"): ALONG,
    ("cli", "contest"): AT_START,
    ("cli", "commands.demo"): OPTAX,
    ("commands.benching", "bench"): OPTAX,
    ("commands.benching", "commands.demo"): OPTAX,
    ("commands.planning", "commands.loading"): OPTAX,
}
"""(importer, what it imports inside of functions) → why not at its top."""


@dataclass(frozen=True, slots=True)
class Import:
    """One module of ours that another names.

    Attributes:
      importer, imported: their names, without `rhino_jax.`.
      line: where.
      is_inside: whether it is inside a function.
      is_for_types: whether only type checkers follow it.
    """

    importer: str
    imported: str
    line: int
    is_inside: bool
    is_for_types: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(parts) or "rhino_jax"] = path
    return found


def package_of(module: str) -> str:
    """Return the entry of `ORDER` that a module belongs to."""
    first, *below = module.split(".")
    nested = ".".join([first, *below[:1]])
    return nested if nested in ORDER else first


@cache
def imports() -> tuple[Import, ...]:
    return tuple(
        Import(name, imported, node.lineno, is_inside, is_for_types)
        for name, path in modules().items()
        for node, is_inside, is_for_types in statements(parsed(path))
        for imported in named(node)
    )


def statements(
    node: ast.AST, is_inside: bool = False, is_for_types: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, is_inside, is_for_types
            continue
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        is_check = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        yield from statements(child, is_inside or is_function, is_for_types or is_check)


def named(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The modules of ours that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.level == 0, "imports are absolute"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return {_module(n) for n in names if package_of(n) == "rhino_jax"}


def _module(name: str) -> str:
    """`plan.plan` of `rhino_jax.plan.plan.PlanData`."""
    name = name.partition(".")[2]
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or "rhino_jax"


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that reach one another; by taking away all that imports nothing left."""
    left = {name: set(others) for name, others in edges.items()}
    while True:
        ends = {name for name, others in left.items() if not others & left.keys()}
        if not ends:
            break
        left = {name: others for name, others in left.items() if name not in ends}
    reach = {name: _reached(name, left) for name in left}
    groups = {
        tuple(sorted(n for n in reach[name] if name in reach[n]))
        for name in left
        if name in reach[name]
    }
    return sorted(map(list, groups))


def _reached(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [name]
    while todo:
        for other in edges[todo.pop()] & edges.keys():
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


def test_the_source_is_read() -> None:
    assert len(modules()) > 300 and len(imports()) > 1000
    assert any(i.is_inside for i in imports())
    assert any(i.is_for_types for i in imports())
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == [
        ["a", "b", "c"]
    ]


@pytest.mark.parametrize("with_types", [False, True])
def test_no_module_imports_itself_through_others(with_types: bool) -> None:
    """At the top with what is for types alone, and in any function without."""
    edges: dict[str, set[str]] = {name: set() for name in modules()}
    for i in imports():
        if not (i.is_inside if with_types else i.is_for_types):
            edges[i.importer].add(i.imported)
    assert circles(edges) == []


def test_packages_import_what_stands_before_them() -> None:
    found = {package_of(name) for name in modules()}
    assert found == set(ORDER), "ORDER is not of the packages that there are"
    place = {name: k for k, name in enumerate(ORDER)}
    wrong = [
        str(i)
        for i in imports()
        if place[package_of(i.imported)] > place[package_of(i.importer)]
    ]
    assert wrong == []


def test_packages_import_no_more_than_they_may() -> None:
    wrong = [
        str(i)
        for i in imports()
        if (package := package_of(i.importer)) in MAY_IMPORT
        and package_of(i.imported) not in {package, *MAY_IMPORT[package].split()}
    ]
    assert wrong == []


def test_imports_inside_of_functions_have_a_reason() -> None:
    found: set[tuple[str, str]] = set()
    wrong = []
    for i in imports():
        if not i.is_inside:
            continue
        reasons = [
            (importer, start)
            for importer, start in INSIDE_FUNCTIONS
            if i.importer == importer and f"{i.imported}.".startswith(f"{start}.")
        ]
        found.update(reasons)
        if not reasons:
            wrong.append(str(i))
    assert wrong == []
    assert found == set(INSIDE_FUNCTIONS), "reasons for what is no longer there"


@cache
def names_in(module: str) -> frozenset[str]:
    """What may be imported from a module: names of its top level, and modules below."""
    found = {n.rpartition(".")[2] for n in modules() if n.rpartition(".")[0] == module}
    todo = list(parsed(modules()[module]).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If | ast.Try | ast.With):
            todo += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((a.asname or a.name).partition(".")[0] for a in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        else:
            found.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return frozenset(found)


def test_tests_import_what_is_there() -> None:
    """Of tests that are not run beside a change, too."""
    wrong, count = [], 0
    for path in TESTS.rglob("*.py"):
        for node, *_ in statements(parsed(path)):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            package, _, module = node.module.partition(".")
            if package != "rhino_jax":
                continue
            module = module or "rhino_jax"
            known = names_in(module) if module in modules() else frozenset()
            if module == "rhino_jax":
                known |= {package_of(name) for name in modules()}
            count += 1
            wrong += [
                f"{path.name}:{node.lineno}: {alias.name} of {node.module}"
                for alias in node.names
                if alias.name not in known
            ]
    assert count > 500
    assert wrong == []
