"""The source of the package and of its tests, read once."""

from __future__ import annotations

import ast
import io
import tokenize
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


_CODE = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP}


def code_tokens(text: str) -> int:
    """Return the number of names, numbers, strings and operators of a source.

    Docstrings and comments do not count, and an f-string is one.
    """
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docs.update(range(node.lineno, (node.end_lineno or 0) + 1))
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth -= kind in ("FSTRING_END", "TSTRING_END")
        if not depth and token.start[0] not in docs:
            count += token.type in _CODE or kind in ("FSTRING_START", "TSTRING_START")
        depth += kind in ("FSTRING_START", "TSTRING_START")
    return count
