"""The result of `plan.check`: differences of two runs, and their displays.

Displays are a line, text and HTML.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhino_jax.explain.report.html import sections_to_html
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.text import sections_to_text
from rhino_jax.explain.results.dress import dressed
from rhino_jax.units import format_count, format_seconds
from rhino_jax.verify import check as data
from rhino_jax.verify.comparison import ROUNDINGS


if TYPE_CHECKING:
    from rhino_jax.verify.check import CheckData
    from rhino_jax.verify.comparison import ComparedLeaf


TOP_LEAVES = 10


def check_line(found: CheckData) -> str:
    """Return one line with program, mesh, and whether the results agree."""
    bad = sum(not leaf.ok for leaf in found.leaves)
    said = "ok" if found.ok else f"{format_count(bad)} differ"
    arrays = f"{format_count(len(found.leaves))} arrays"
    return (
        f"Check({found.program_name} on {format_mesh(found.mesh_axes)}, run on"
        f" {found.devices} compared with one: {arrays}, {said})"
    )


def check_to_text(found: CheckData, *, full: bool = False) -> str:
    """Return the whole report of a check as text.

    Args:
      found: the check.
      full: show every leaf, not only those that differ most.
    """
    return sections_to_text(tell_check(found, full=full))


def check_to_html(found: CheckData) -> str:
    """Return the whole report of a check as self-contained HTML."""
    return sections_to_html(tell_check(found), line=check_line(found))


def tell_check(found: CheckData, *, full: bool = False) -> tuple[Section, ...]:
    """Return all sections of a check's report."""
    bad = [leaf for leaf in found.leaves if not leaf.ok]
    result = f"{format_count(len(found.leaves))} arrays agree"
    if bad:
        result = f"{len(bad)} of {len(found.leaves)} arrays differ"
    head = Section(
        f"check of {found.program_name}",
        facts=(
            ("mesh", format_mesh(found.mesh_axes)),
            ("run on", f"{found.devices}, and on one of them"),
            ("result", result),
            ("took", format_seconds(found.seconds)),
        ),
    )
    count = len(found.leaves) if full else max(TOP_LEAVES, len(bad))
    shown = found.leaves[:count]
    rest = len(found.leaves) - len(shown)
    lines = (f"and {format_count(rest)} more, with less",) * bool(rest)
    table = Table(
        ("array", "type", "absolute", "relative", "allowed", "worst at", ""),
        tuple(_row(leaf) for leaf in shown),
        "<<>>><<",
        marked=frozenset(i for i, leaf in enumerate(shown) if not leaf.ok),
    )
    left = Section(
        "not compared",
        table=Table(("what", "why"), found.not_compared, "<<"),
    )
    return (
        head,
        Section("largest differences", table=table, lines=lines),
        *([left] if found.not_compared else []),
    )


def _allowed(leaf: ComparedLeaf) -> str:
    """Format a leaf's tolerance: relative, and absolute for rounded 16-bit floats."""
    rounding = f" or ±{ROUNDINGS * leaf.rounding:.2g}" if leaf.rounding else ""
    return f"{leaf.tolerance:.2g}{rounding}"


def _row(leaf: ComparedLeaf) -> tuple[str, ...]:
    exact = not leaf.tolerance
    return (
        leaf.path,
        f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]",
        f"{leaf.absolute:.2g}",
        "" if exact else f"{leaf.relative:.2g}",
        "equal" if exact else _allowed(leaf),
        f"[{', '.join(map(str, leaf.worst))}]" if leaf.relative else "",
        "" if leaf.ok else f"{format_count(leaf.differing)} differ",
    )


class Check(data.CheckData):
    """Results of a planned program compared with those of one device.

    Its attributes are those of `rhino_jax.verify.check.CheckData`.
    """

    __slots__ = ()

    @classmethod
    def of(cls, found: data.CheckData) -> Check:
        """Return a check's data as this class."""
        return dressed(cls, found)

    def table(self, *, full: bool = False) -> str:
        """Return the whole report as text.

        Args:
          full: show every leaf, not only those that differ most.
        """
        return check_to_text(self, full=full)

    def __repr__(self) -> str:
        return check_line(self)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return check_to_html(self)
