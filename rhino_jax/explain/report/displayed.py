"""Displays that results have in common: text, and HTML for notebooks."""

from __future__ import annotations

from rhino_jax.explain.report.html import sections_to_html
from rhino_jax.explain.report.section import Section
from rhino_jax.explain.report.text import sections_to_text


class Displayed:
    """A result that shows itself; `print` it to read it."""

    __slots__ = ()

    def _line(self) -> str:
        """Return the result in one line; empty for none."""
        return ""

    def _sections(self, *, full: bool) -> tuple[Section, ...]:
        raise NotImplementedError

    def table(self, *, full: bool = False) -> str:
        """Return the whole report as text, at most 100 columns wide.

        Args:
          full: show every row, not only the first ones of long tables.
        """
        return sections_to_text(self._sections(full=full))

    def __repr__(self) -> str:
        return self._line()

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return sections_to_html(self._sections(full=False), line=self._line())
