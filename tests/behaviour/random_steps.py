"""Random train steps, planned with options at random and run on eight devices.

`python -m tests.behaviour.random_steps KIND FIRST COUNT` says which are wrong.
"""

from __future__ import annotations

import random
import sys
import traceback
from typing import Any

import jax
import numpy as np

import rhino_jax as rhino
from rhino_jax.hardware.target import Device, Target, Tier
from tests.behaviour.rare_ops import RARE
from tests.passes.microbatch.random_programs import Sizes, arguments, step_of


KINDS = "general", "rare", "options"
"""The ops of `random_programs`, with rarer ones, and with micro-batches, recompute and
stages."""

RATES = tuple((name, 1e6) for name in ("float32", "float64", "bfloat16"))
TARGET = Target(
    name="sharding_pays",
    device=Device(
        peak_flops_per_s=RATES, hbm_bytes=2**34, hbm_bytes_per_s=1e6, launch_s=1e-12,
        kinds=("cpu",),
    ),
    tiers=(Tier(name="links", alpha_s=1e-12, bytes_per_s=3e6),),
)  # fmt: skip
"""Slow devices on fast links, so that arrays of a few numbers are sharded."""

REFUSALS = rhino.MicrobatchError, rhino.StageError, rhino.ScheduleError
"""Right where micro-batches or stages are asked for. About a fifth of the steps of
"options" are refused: 6 of the first 24, most since they need their whole batch."""


def wrong_step(kind: str, seed: int, **changes: Any) -> str | None:
    """Run a step; return how it differs from one device, or None.

    Args:
      kind: see `KINDS`.
      seed: of the step and its options.
      changes: options that are not drawn.

    What differs in float32 must be equal to 1e-8 in float64: a maximum of two numbers
    that rounding makes equal has another gradient.
    """
    chance = random.Random(seed)
    sizes = Sizes(
        *(chance.choice(n) for n in ((6, 8, 8, 16), (3, 4, 8), (4, 8), (5, 8)))
    )
    step = step_of(seed, RARE if kind != "general" else ())
    args = arguments(seed, sizes)
    options = options_of(kind, chance) | changes
    try:
        jax.eval_shape(step, *args)
    except (TypeError, ValueError, NotImplementedError):
        return None  # no program: an op does not take these shapes
    try:
        found = difference(step, args, options, 1e-3)
        if found is not None:
            with jax.enable_x64(True):
                wide = jax.tree.map(
                    lambda x: x.astype("f8") if x.dtype == "f4" else x, args
                )
                found = difference(step, wide, options, 1e-8)
    except REFUSALS as error:
        is_asked = options["microbatches"] != 1 or "stage" in options["mesh"]
        return None if is_asked else f"{seed} {options}: {error}"
    except Exception:
        return f"{seed} {options}: {traceback.format_exc()[-1500:]}"
    return None if found is None else f"{seed} {options}: {found}"


def options_of(kind: str, chance: random.Random) -> dict[str, Any]:
    """Draw a mesh, and what else is asked of a plan."""
    meshes = [{"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}]
    options: dict[str, Any] = {"mesh": chance.choice(meshes), "microbatches": 1}
    if kind == "options":
        meshes = [*meshes, {"stage": 2, "x": 4}, {"stage": 2, "x": 2, "y": 2}]
        options["mesh"] = chance.choice(meshes)
        options["microbatches"] = chance.choice([1, 2, 2, "auto"])
        options["recompute"] = chance.choice(["auto", "as written", "none"])
        options["donate_argnums"] = chance.choice([(), (0,)])
    return options


def difference(step: Any, args: Any, options: Any, rtol: float) -> str | None:
    """Return where a plan's results differ from one device's, or None."""
    whole = jax.tree_util.tree_leaves_with_path(jax.jit(step)(*args))
    sharded = rhino.auto_shard(
        step, hardware=TARGET, level="fast", progress=False, **options
    )
    got = jax.tree.leaves(sharded(*jax.tree.map(jax.numpy.asarray, args)))
    most = max(np.abs(np.nan_to_num(x)).max(initial=0) for _, x in whole)
    for (path, a), b in zip(whole, got, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return (
                f"{jax.tree_util.keystr(path)}: {a.dtype}{a.shape}, {b.dtype}{b.shape}"
            )
        a, b = np.asarray(a), np.asarray(b)
        if not np.allclose(a, b, rtol, rtol * most / 10, equal_nan=True):
            gap = np.nanmax(np.abs(a - b))
            return f"{jax.tree_util.keystr(path)} differs by {gap:.3g}"
    return None


def main(kind: str, first: int, count: int) -> None:
    for seed in range(first, first + count):
        print(seed, wrong_step(kind, seed), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
