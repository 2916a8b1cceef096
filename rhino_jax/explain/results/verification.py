"""The result of `plan.verify`: predictions compared with the compiled program."""

from __future__ import annotations

from rhino_jax.explain.report.verification import (
    verification_line,
    verification_to_html,
    verification_to_text,
)
from rhino_jax.explain.results.dress import dressed
from rhino_jax.verify import verification as data


class Verification(data.VerificationData):
    """Predictions of a plan compared with the compiled program.

    Its attributes are those of `rhino_jax.verify.verification.VerificationData`.
    """

    __slots__ = ()

    @classmethod
    def of(cls, found: data.VerificationData) -> Verification:
        """Return a verification's data as this class."""
        return dressed(cls, found)

    def table(self, *, full: bool = False) -> str:
        """Return predicted and compiled quantities as text at most 100 columns wide.

        Args:
          full: show every difference and collective.
        """
        return verification_to_text(self, full=full)

    def __repr__(self) -> str:
        return verification_line(self)

    def _repr_html_(self) -> str:
        return verification_to_html(self)
