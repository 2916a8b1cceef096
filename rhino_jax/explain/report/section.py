"""Elements of a report, before it is text or HTML: sections of facts and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rhino_jax.units import format_count


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header.

    Attributes:
      header: names of the columns.
      rows: cells, one per column.
      align: one of "<" and ">" per column.
      shrink: columns that shrink if a line is too long, the widest first.
      shares: length in [0, 1] of a bar next to each row; empty for no bars.
      marked: positions of highlighted rows.
      below: column of sentences, which plain text shows below their rows; None: no such
        column.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str
    shrink: tuple[int, ...] = (0,)
    shares: tuple[float, ...] = ()
    marked: frozenset[int] = frozenset()
    below: int | None = None

    def rows_of(self, begin: int, end: int) -> Table:
        """Return a copy with the rows from `begin` to before `end`."""
        marked = frozenset(i - begin for i in self.marked if begin <= i < end)
        return replace(
            self,
            rows=self.rows[begin:end],
            shares=self.shares[begin:end],
            marked=marked,
        )


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report.

    Attributes:
      title: a few words; empty for the head of the report.
      facts: (name, value) pairs.
      table: rows, if any.
      lines: sentences below; one that begins with "and" counts the rows that are left
        out.
      rest: the rows that are left out, which HTML shows folded.
      drawing: HTML shown above all else; plain text has none.
      draws_table: whether the drawing shows all of the table, which HTML then leaves
        out.
      is_open: whether HTML shows the section unfolded.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    lines: tuple[str, ...] = ()
    rest: Table | None = None
    drawing: str = ""
    draws_table: bool = False
    is_open: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether it has neither facts, nor lines, nor rows."""
        has_rows = self.table is not None and bool(self.table.rows)
        return not (self.facts or self.lines or has_rows)


def first_rows(
    title: str,
    table: Table,
    most: int | None,
    amounts: Sequence[float],
    form: Callable[[float], str],
    *,
    lines: Sequence[str] = (),
    counts: Sequence[int] = (),
) -> Section:
    """Return a section with the first rows of a table, and the others left out.

    Args:
      title: as in `Section`.
      table: all rows.
      most: number of rows to show; None: all.
      amounts: quantity of every row; a line has the sum of those that are left out.
      form: formats that sum.
      lines: further lines.
      counts: number of items that each row stands for; empty: one.
    """
    total = len(table.rows)
    shown = total if most is None else min(most, total)
    if shown < total:
        rest = form(sum(amounts[shown:]))
        number = sum(counts[shown:]) if counts else total - shown
        lines = [f"and {format_count(number)} more: {rest}", *lines]
    return Section(
        title,
        table=table.rows_of(0, shown),
        lines=tuple(lines),
        rest=table.rows_of(shown, total),
    )
