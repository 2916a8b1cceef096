"""The source of the package and of its tests, read once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import rhino_jax


PACKAGE = Path(rhino_jax.__file__).parent
TESTS = Path(__file__).parent


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is shared: read it only."""
    return ast.parse(text_of(path))
