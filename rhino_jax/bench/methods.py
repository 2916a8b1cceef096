"""Methods: the ways to shard a workload that a benchmark compares, by name.

dp, zero1, fsdp, megatron, megatron+sp, megatron+fsdp, megatron+fsdp+sp, experts,
fsdp+experts, megatron+experts
    a recipe at its best: rhino's cheapest plan within it, every value annotated
fsdp@matmul
    the same plan of a recipe, with annotations only at the inputs and outputs of
    matmuls, and at arguments and results: as in the fastest hand-written programs
dp@batch, zero1@batch, fsdp@batch
    the recipe to the letter (FSDP shards every parameter that can be), with
    annotations only at arguments and results, and on the batch dim of activations:
    as most people type it
fast, best
    rhino's own plans of the baseline program
auto
    rhino's plan with micro-batches, remat and offload where they pay
refined, refined:5
    of this many candidates (default 3), and recipes@batch, the one with the fastest
    compiled step that fits in memory
gpipe, 1f1b, interleaved, zero-bubble, token-slices
    a pipeline with a stage on every device, run by this schedule; only in suites that
    run stages in separate processes, or plan them
alpa
    stages, their devices and micro-batches as Alpa's authors published them for the
    row, planned by rhino, which chooses the best shardings and remat for these
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rhino_jax.bench.checks import BenchError
from rhino_jax.errors import nearest
from rhino_jax.recipes.table import EXPERTS


RECIPES = tuple(expert.name for expert in EXPERTS)
PLAIN = ("dp", "zero1", "fsdp")
RHINO = ("fast", "best", "auto", "refined")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "token-slices")
ALPA = "alpa"
REFINE = 3
"""Number of candidates that `refined` compiles by default."""


@dataclass(frozen=True, slots=True)
class ShardingMethod:
    """One way to shard a workload.

    Attributes:
      plan: a recipe's name, "fast", "best", "auto" or "refined"; a schedule; "alpa".
      density: values with a sharding annotation: "all", those at the "matmul"s, or the
        "batch" dim of all values that lead with it.
      refine: number of candidates that "refined" compiles; 0 for all other plans.
    """

    plan: str
    density: str = "all"
    refine: int = 0

    @property
    def is_recipe(self) -> bool:
        return self.plan in RECIPES

    @property
    def name(self) -> str:
        """Name as suites write it, which `parse_method` reads."""
        if self.refine:
            return self.plan if self.refine == REFINE else f"refined:{self.refine}"
        return self.plan if self.density == "all" else f"{self.plan}@{self.density}"


def parse_method(text: Any) -> ShardingMethod:
    """Return the method of a name.

    Raises:
      BenchError: there is no such method.
    """
    known = (
        *RECIPES,
        *(f"{r}@matmul" for r in RECIPES),
        *(f"{r}@batch" for r in PLAIN),
        *RHINO,
        *SCHEDULES,
        ALPA,
    )
    plan, _, density = str(text).partition("@")
    plan, colon, number = plan.partition(":")
    is_known = text in (*known, *(f"{r}@all" for r in RECIPES))
    if colon and plan == "refined" and not density:
        is_known = number.isdecimal() and int(number) >= 2
    if not is_known:
        raise BenchError(
            f"method {text!r} is not known.{nearest(str(text), known)}",
            numbers=f"known: {', '.join(known)}, refined:5 (any number from 2)",
            fix="use one of these.",
        )
    refine = int(number or REFINE) if plan == "refined" else 0
    return ShardingMethod(plan, density or "all", refine)
