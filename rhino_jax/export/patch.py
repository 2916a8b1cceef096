"""A diff of the user's files that adds constraints around expressions."""

from __future__ import annotations

import ast
import difflib
import itertools
import linecache
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rhino_jax.export.constraints import Constraint, node_at, written_around
from rhino_jax.frontend.provenance import cell_of
from rhino_jax.ir.spec import Spec


@dataclass(frozen=True, slots=True)
class Words:
    """Notation of a constraint in one style.

    Attributes:
      called: the function, called with an array and a layout.
      layout: returns the source of a layout.
      imports: import statement that a file needs for it, as "import jax".
    """

    called: str
    layout: Callable[[Constraint, Spec], str]
    imports: str

    def around(self, c: Constraint) -> tuple[str, str]:
        """Return the text to insert before and after an expression."""
        before, after = self._around(c)
        if c.is_recomputed:
            return f"{before}jax.checkpoint(lambda: ", f")(){after}"
        return before, after

    def _around(self, c: Constraint) -> tuple[str, str]:
        forward = [self.layout(c, spec) for spec in c.forward]
        if c.backward is None:
            after = "".join(f", {said})" for said in forward)
            return f"{self.called}(" * len(forward), after
        backward = [self.layout(c, spec) for spec in c.backward]
        after = f", [{', '.join(forward)}], [{', '.join(backward)}])"
        return f"{BOTH_WAYS}(", after

    def both_ways(self) -> str:
        """Return the function for values whose cotangents have other layouts."""
        return _BOTH_WAYS.format(name=BOTH_WAYS, called=self.called)


BOTH_WAYS = "constrained_both_ways"
_BOTH_WAYS = '''

def {name}(x, forward, backward):
    """`x` in the layouts of `forward`, one after the other, and its cotangent in those
    of `backward`; as they are where there are none."""

    def through(x, layouts):
        for layout in layouts:
            x = {called}(x, layout)
        return x

    identity = jax.custom_vjp(lambda x: through(x, forward))
    identity.defvjp(
        lambda x: (through(x, forward), None), lambda _, g: (through(g, backward),)
    )
    return identity(x)

'''


def diff_of(constraints: Iterable[Constraint], words: Words) -> str:
    """Return a unified diff of all files, for `patch -p1` in the current folder.

    Args:
      constraints: constraints, sorted by file.
      words: notation of the style.
    """
    parts: list[str] = []
    for file, group in itertools.groupby(constraints, key=lambda c: c.file):
        lines = linecache.getlines(file)
        if not lines:
            continue
        edited = _edited(file, lines, list(group), words)
        if edited != lines:
            if any(f"{BOTH_WAYS}(" in line for line in edited):
                edited = _with_function(edited, words)
            if any("jax.c" in line for line in edited):
                edited = _with_import(edited, "import jax")
            edited = _with_import(edited, words.imports)
            name = _shown(file)
            parts += difflib.unified_diff(lines, edited, f"a/{name}", f"b/{name}", n=1)
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def _shown(file: str) -> str:
    """Return a path as a diff shows it: relative, or the number of a cell."""
    cell = cell_of(file)
    if cell != file:
        return cell
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(path).lstrip(os.sep)


def _edited(
    file: str, lines: Sequence[str], constraints: Sequence[Constraint], words: Words
) -> list[str]:
    rows = [line.encode() for line in lines]
    starts = [0, *itertools.accumulate(map(len, rows))]
    source = b"".join(rows)
    dropped: dict[int, int] = {}
    events: list[tuple[tuple[int, int, int], bytes]] = []
    for c in constraints:
        if c.others or node_at(file, c.span) is None:
            continue
        begin, end = (
            starts[c.span[0] - 1] + c.span[1],
            starts[c.span[2] - 1] + c.span[3],
        )
        before, after = words.around(c)
        written = written_around(file, c.span)
        if written is not None and c.forward:
            # Replace the spec of the user's own constraint by the plan's.
            assert written.end_lineno is not None and written.end_col_offset is not None
            begin = starts[written.lineno - 1] + written.col_offset
            end = starts[written.end_lineno - 1] + written.end_col_offset
            said = words.layout(c, c.forward[-1])
            if ast.unparse(written) != ast.unparse(ast.parse(said, mode="eval").body):
                events.append(((begin, 1, -end), said.encode()))
                dropped[begin] = end
            continue
        # Sort ends before beginnings; outer ones begin first and end last.
        events.append(((begin, 1, -end), before.encode()))
        events.append(((end, 0, -begin), after.encode()))
    pieces, last = [], 0
    for (at, *_), text in sorted(events):
        pieces += [source[last:at], text]
        last = dropped.get(at, at)
    return (b"".join([*pieces, source[last:]])).decode().splitlines(keepends=True)


def _with_function(lines: list[str], words: Words) -> list[str]:
    """Return the file with `Words.both_ways` inserted after its imports."""
    after = 0
    for node in ast.parse("".join(lines)).body:
        is_page = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_page and not isinstance(node, ast.Import | ast.ImportFrom):
            break
        after = node.end_lineno or 0
    added = words.both_ways().splitlines(keepends=True)
    return [*lines[:after], *added, *lines[after:]]


def _with_import(lines: list[str], line: str) -> list[str]:
    """Return the file with an import added after its docstring and `__future__`."""
    tree = ast.parse("".join(lines))
    if any(
        isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node) == line
        for node in tree.body
    ):
        return lines
    after = 0
    for node in tree.body:
        is_page = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not is_page and not is_future:
            break
        after = node.end_lineno or 0
    return [*lines[:after], f"{line}\n", *lines[after:]]
