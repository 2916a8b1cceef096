"""What a report is made of, before it is text or HTML: sections of facts and tables."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header.

    Attributes:
      header: names of the columns.
      rows: cells, one per column.
      align: one of "<" and ">" per column.
      shrink: columns that give way when a line is too long, the widest first.
      shares: for a drawn bar beside each row, its length in [0, 1]; empty for none.
      marked: positions of rows to set off.
      below: column of sentences, which in plain text stand below their rows.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str
    shrink: tuple[int, ...] = (0,)
    shares: tuple[float, ...] = ()
    marked: frozenset[int] = frozenset()
    below: int | None = None

    def rows_of(self, begin: int, end: int) -> Table:
        """The same with some of its rows."""
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
      lines: sentences below; one that begins with "and" counts what is left out.
      rest: the rows that are left out, which HTML opens.
      drawing: HTML of its own, which stands above all else; plain text has none.
      draws_table: whether it shows all of the table, which HTML then leaves out.
      is_open: whether HTML shows it before it is asked for.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    lines: tuple[str, ...] = ()
    rest: Table | None = None
    drawing: str = ""
    draws_table: bool = False
    is_open: bool = True
