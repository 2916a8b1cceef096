"""Names are standard terms, and no two classes share one."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.helpers_source import PACKAGE, parsed


def test_no_two_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    )
    assert sum(names.values()) > 100
    assert [f"{name}: {n}" for name, n in names.items() if n > 1] == []


@pytest.mark.parametrize("prefix", ["LEAST_", "MOST_"])
def test_limits_are_min_and_max(prefix: str) -> None:
    """Constants that bound something are called `MIN_` or `MAX_`."""
    found = [
        f"{path.name}: {node.id}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Name) and node.id.lstrip("_").startswith(prefix)
    ]
    assert found == []


PRIVATE = ("wish", "remade", "made_again", "open_sum", "kept_instead", "said_by")
"""Words that only this project used for options, remat and deferred reductions."""


def test_functions_and_classes_have_standard_names() -> None:
    defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = {
        f"{path.name}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, defined)
    }
    assert len(names) > 100
    found = {n for n in names if any(word in n.lower() for word in PRIVATE)}
    assert found == set()


NO_SUBJECT = {"What", "Of", "Those", "Which", "How", "Where", "Why", "When"}


def test_docstrings_begin_with_what_is_returned_or_done() -> None:
    """A first line names its object; `Whether` is for what returns a bool."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    wrong, count = [], 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            doc = ast.get_docstring(node) if isinstance(node, kinds) else None
            if not doc:
                continue
            count += 1
            first = doc.split()[0].strip(".,:;")
            returns = getattr(node, "returns", None)
            is_bool = isinstance(returns, ast.Name) and returns.id == "bool"
            if first in NO_SUBJECT or (first == "Whether" and not is_bool):
                line = doc.splitlines()[0]
                name = getattr(node, "name", "the module")
                wrong.append(f"{path.name}: {name}: {line}")
    assert count > 100
    assert wrong == []
