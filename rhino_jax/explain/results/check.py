"""The result of `plan.check`: differences of two runs, and their displays."""

from __future__ import annotations

from rhino_jax.explain.report.check import (
    check_line,
    check_to_html,
    check_to_text,
)
from rhino_jax.explain.results.dress import dressed
from rhino_jax.verify import check as data


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
