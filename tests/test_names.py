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
    assert sum(names.values()) > 500
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
