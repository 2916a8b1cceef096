"""A plan as one HTML file: its report, with sorting and filtering by a script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhino_jax.explain.report.html import page, to_html
from rhino_jax.explain.report.views.script import SCRIPT


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData


def plan_page(plan: PlanData) -> str:
    """Return the HTML page of a plan; it needs no network."""
    body = f"{to_html(plan)}\n<script>{SCRIPT}</script>"
    return page(body, title=f"plan of {plan.program_name}")
