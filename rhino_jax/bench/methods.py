"""Methods: the ways to shard a workload that a benchmark compares, by name.

dp, zero1, fsdp, megatron, megatron+sp, megatron+fsdp, megatron+fsdp+sp
    a recipe at its best: rhino's cheapest plan within it, every value said
fsdp@matmul
    the same plan of a recipe, of which only the inputs and outputs of matmuls
    are said, and the arguments and results: how the fastest hand-written
    programs do it
dp@batch, zero1@batch, fsdp@batch
    the recipe to the letter (FSDP cuts every parameter that can be), of which only
    the arguments and results are said, and that activations keep the batch cut: how
    most people type it
fast, best
    rhino's own plans of the program as it is written
auto
    rhino's plan with what of micro-batches, recompute and offload pays
refined, refined:5
    of so many candidates (3), and recipes@batch, the one that the compiler makes
    fastest in memory
gpipe, 1f1b, interleaved, zero-bubble
    a pipeline with a stage on every device, run by this schedule; only of suites that
    run stages in processes of their own
alpa
    stages, their devices and micro-batches as Alpa's authors published them for the
    row, planned by rhino: shardings, and what is made again, are its best for these
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rhino_jax.bench.errors import BenchError
from rhino_jax.errors import nearest


RECIPES = (
    "dp",
    "zero1",
    "fsdp",
    "megatron",
    "megatron+sp",
    "megatron+fsdp",
    "megatron+fsdp+sp",
)
PLAIN = ("dp", "zero1", "fsdp")
RHINO = ("fast", "best", "auto", "refined")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "token-slices")
ALPA = "alpa"
DENSITIES = ("all", "matmul", "batch")
REFINE = 3
"""Candidates that `refined` compiles unless it says another number."""


@dataclass(frozen=True, slots=True)
class ShardingMethod:
    """One way to shard a workload.

    Attributes:
      plan: a recipe's name, "fast", "best", "auto" or "refined"; a schedule; "alpa".
      density: which values the program is told the sharding of: "all", those at the
        "matmul"s, or the "batch" of all that lead with it.
      refine: how many candidates "refined" compiles; 0 for all other plans.
    """

    plan: str
    density: str = "all"
    refine: int = 0

    @property
    def is_recipe(self) -> bool:
        return self.plan in RECIPES

    @property
    def name(self) -> str:
        """As suites write it; what `parse_method` reads."""
        if self.refine:
            return self.plan if self.refine == REFINE else f"refined:{self.refine}"
        return self.plan if self.density == "all" else f"{self.plan}@{self.density}"


def parse_method(text: Any) -> ShardingMethod:
    """The method of that name.

    Raises:
      BenchError: there is none.
    """
    known = (
        *RECIPES,
        *(f"{r}@matmul" for r in RECIPES),
        *(f"{r}@batch" for r in PLAIN),
        *RHINO,
        *SCHEDULES,
        ALPA,
    )
    plan, at, density = str(text).partition("@")
    plan, colon, number = plan.partition(":")
    is_known = plan in RECIPES or (plan in (*RHINO, *SCHEDULES, ALPA) and not at)
    if at and density not in DENSITIES:
        is_known = False
    if density == "batch" and plan not in PLAIN:
        is_known = False
    if colon and not (plan == "refined" and number.isdecimal() and int(number) >= 2):
        is_known = False
    if not isinstance(text, str) or not is_known:
        raise BenchError(
            f"method {text!r} is not known.{nearest(str(text), known)}",
            numbers=f"known: {', '.join(known)}, refined:5 (any number from 2)",
            fix="use one of these.",
        )
    refine = int(number or REFINE) if plan == "refined" else 0
    return ShardingMethod(plan, density or "all", refine)
