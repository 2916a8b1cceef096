"""Every package says what comes in, what goes out, and how its files follow."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers_source import (
    PACKAGE as ROOT,
    TESTS,
    code_tokens,
    parsed,
    text_of,
)


IN_PROSE = ("_compat", "contest", "solver", "utils")
"""Packages that say the same in their own words."""

PACKAGES = tuple(
    name
    for init in sorted(ROOT.glob("*/__init__.py"))
    if (name := init.parent.name) not in IN_PROSE
)

EXTENDED = (
    "cost",
    "frontend/rules",
    "hardware",
    "recipes",
    "explain/report",
    "rewrite",
)
"""What outsiders add files or entries to."""

MAX_LINES_OF_A_FILE = 500
MAX_LINES_OF_A_FUNCTION = 100
"""Lines of the body, without signature and docstring."""

CODE_TOKENS = {
    "": 4_400,
    "_compat": 5_900,
    "analysis": 34_600,
    "attention": 9_100,
    "bench": 42_600,
    "commands": 7_500,
    "contest": 2_300,
    "cost": 5_200,
    "explain": 34_200,
    "export": 12_400,
    "frontend": 67_600,
    "hardware": 12_100,
    "ir": 12_400,
    "model": 25_100,
    "models": 17_300,
    "passes": 97_900,
    "pipeline": 27_200,
    "plan": 18_900,
    "planner": 86_900,
    "recipes": 4_800,
    "rewrite": 6_600,
    "runtime": 47_700,
    "solver": 34_800,
    "sweep": 9_600,
    "utils": 6_700,
    "verify": 49_900,
}
"""Most code tokens of each package. A number here is lowered, and never raised."""


def page_of(package: str) -> str:
    return ast.get_docstring(parsed(ROOT / package / "__init__.py")) or ""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_page_names_files_that_are_there(package: str) -> None:
    page = page_of(package)
    assert len(page.splitlines()) <= 15
    for part in ("In: ", "Out: ", "Order: "):
        assert f"\n{part}" in page
    order = page.partition("\nOrder: ")[2].partition("\n\n")[0]
    files = [name for name in re.findall(r"`([a-z_]+)`", order)]
    assert len(files) > 2
    here = ROOT / package
    missing = [
        f for f in files if not ((here / f"{f}.py").exists() or (here / f).is_dir())
    ]
    assert missing == []


@pytest.mark.parametrize("package", EXTENDED)
def test_what_is_extended_says_how(package: str) -> None:
    page = page_of(package)
    assert "\nTo add " in page
    assert len(page.splitlines()) <= 15


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield name and length of every function."""
    for node in nodes(tree, ast.stmt | ast.excepthandler | ast.match_case):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0]
        has_page = ast.get_docstring(node) is not None
        start = (first.end_lineno or 0) + 1 if has_page else first.lineno
        yield node.name, (node.end_lineno or 0) - start + 1


def nodes(tree: ast.AST, kinds: Any) -> Iterator[ast.AST]:
    """Yield what stands in a tree below nodes of these kinds alone."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        todo += [n for n in ast.iter_child_nodes(node) if isinstance(n, kinds)]


def test_functions_are_counted_by_their_bodies() -> None:
    source = (
        'def f(\n  x,\n):\n  """One\n\n  two."""\n\n  def g(): return x\n  return g'
    )
    assert dict(functions(ast.parse(source))) == {"f": 3, "g": 1}
    inside = "try: x\nexcept E:\n  match x:\n    case 1:\n      def f(): x\n"
    assert dict(functions(ast.parse(inside))) == {"f": 1}


def sources() -> dict[str, Path]:
    """The package's files, and those of its tests, by what they are called here."""
    return {
        path.relative_to(tree.parent).as_posix(): path
        for tree in (ROOT, TESTS)
        for path in tree.rglob("*.py")
    }


def test_files_are_short() -> None:
    lines = {name: len(text_of(p).splitlines()) for name, p in sources().items()}
    assert len(lines) > 100
    assert {p: n for p, n in lines.items() if n > MAX_LINES_OF_A_FILE} == {}


def test_functions_are_short() -> None:
    found = {
        f"{file} {name}": lines
        for file, path in sources().items()
        for name, lines in functions(parsed(path))
        if lines > MAX_LINES_OF_A_FUNCTION
    }
    assert found == {}


def test_counts_of_code_leave_out_what_explains_it() -> None:
    source = 'def f(x):\n  """One."""\n  # two\n  return f"{x} three"'
    assert code_tokens(source) == len("def f ( x ) : return f-string".split())


def test_code_does_not_grow() -> None:
    counts = Counter[str]()
    for path in ROOT.rglob("*.py"):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        counts[package if (ROOT / package).is_dir() else ""] += code_tokens(
            text_of(path)
        )
    assert set(counts) == set(CODE_TOKENS)
    assert {p: n for p, n in counts.items() if n > CODE_TOKENS[p]} == {}


def test_what_ships_is_every_package() -> None:
    listed = re.findall(
        r"^    (rhino_jax[\w.]*)$", text_of(ROOT.parent / "setup.cfg"), re.M
    )
    folders = (
        init.parent.relative_to(ROOT.parent) for init in ROOT.rglob("__init__.py")
    )
    # The top-level configs/ is installed as one.
    assert {*listed} - {"rhino_jax.configs"} == {".".join(f.parts) for f in folders}
