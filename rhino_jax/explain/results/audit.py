"""The result of `rhino.audit`: a hand-sharded program, compiled; its displays."""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.explain.report.audit import (
    audit_line,
    audit_to_html,
    audit_to_text,
)
from rhino_jax.explain.results.dress import dressed
from rhino_jax.explain.results.plan import Plan
from rhino_jax.explain.results.verification import Verification
from rhino_jax.export.code import patch_of
from rhino_jax.verify.by_hand import audit as data


class Audit(data.AuditData):
    """Traffic and memory of a hand-sharded program, compared with rhino's plan of it.

    Its attributes are those of `rhino_jax.verify.by_hand.audit.AuditData`.
    """

    __slots__ = ()

    plan: Plan | None
    rhino: Verification | None

    @classmethod
    def of(cls, found: data.AuditData) -> Audit:
        """Return an audit's data as this class."""
        return dressed(
            cls,
            replace(
                found,
                plan=found.plan and Plan.of(found.plan),
                rhino=found.rhino and Verification.of(found.rhino),
            ),
        )

    def table(self, *, full: bool = False) -> str:
        """Return the whole audit as text at most 100 columns wide.

        Args:
          full: show every line and collective.
        """
        return audit_to_text(self, full=full)

    def patch(self) -> str:
        """Return rhino's plan as a diff of your files, for `patch -p1`.

        It adds constraints at your lines, and changes your own where the plan has
        another layout. Constraints on names alone (`h = with_sharding_constraint(h,
        …)`) stay as they are. Empty if there is no plan.
        """
        return "" if self.plan is None else patch_of(self.plan)

    def __repr__(self) -> str:
        return audit_line(self)

    def _repr_html_(self) -> str:
        return audit_to_html(self)
