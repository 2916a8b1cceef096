"""What `plan.verify` returns: predicted beside compiled, and how they are shown."""

from __future__ import annotations

from rhino_jax.explain.report.verification import (
    verification_line,
    verification_to_html,
    verification_to_text,
)
from rhino_jax.explain.results.dress import dressed
from rhino_jax.verify import verification as data


class Verification(data.VerificationData):
    """What the compiler made of a plan.

    Its attributes are those of `rhino_jax.verify.verification.VerificationData`.
    """

    __slots__ = ()

    @classmethod
    def of(cls, found: data.VerificationData) -> Verification:
        """The same, able to show itself."""
        return dressed(cls, found)

    def table(self, *, full: bool = False) -> str:
        """Predicted beside compiled, as text at most 100 columns wide.

        Args:
          full: show every difference and collective.
        """
        return verification_to_text(self, full=full)

    def __repr__(self) -> str:
        return verification_line(self)

    def _repr_html_(self) -> str:
        return verification_to_html(self)
