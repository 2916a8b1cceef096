"""Random steps of convolutions, by seed, planned and run on eight emulated devices.

`python conv_programs.py SEED …` runs some, prints for each its largest difference
to one device, relative to the largest element.
Checks of XLA end a process: tests run seeds in children (`run_seeds`).
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


HARDWARE = str(Path(__file__).with_name("sharding_pays.toml"))
MESHES = ({"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})


class Layer:
    """One convolution, with sizes by chance.

    Attributes:
      kernel: shape of its kernel.
      options: of `lax.conv_general_dilated`.
      result: shape of its result.
      wrapper: in what it runs: nothing, `remat` or a scan over two kernels.
    """

    def __init__(
        self, chance: random.Random, shape: tuple[int, ...], rare: random.Random
    ) -> None:
        import jax
        import jax.numpy as jnp
        from jax import lax

        dims = "HW"[: len(shape) - 2]
        channels, spatial = shape[-1], shape[1:-1]
        groups = chance.choice([1, 1, *(g for g in (2, 4) if channels % g == 0)])
        if chance.random() < 0.2:
            groups = channels
        per_group = chance.choice([1, 2, 3, 4])
        features = groups * per_group
        self.wrapper = chance.choice(["", "", "remat", "scan"])
        if self.wrapper == "scan":
            features = channels
        window = [
            chance.choice([w for w in (1, 2, 3, 5) if w <= n] or [1]) for n in spatial
        ]
        self.kernel = (*window, channels // groups, features)
        options: dict[str, Any] = {
            "window_strides": [chance.choice([1, 1, 2]) for _ in spatial],
            "padding": chance.choice(["SAME", "SAME", "VALID", "explicit"]),
            "dimension_numbers": (f"N{dims}C", f"{dims}IO", f"N{dims}C"),
            "feature_group_count": groups,
        }
        kind = chance.choice(["", "", "rhs_dilation", "lhs_dilation"])
        if kind:
            options[kind] = [chance.choice([1, 2]) for _ in spatial]
        if options["padding"] == "explicit" or kind == "lhs_dilation":
            # No more than a window less one, so that gradients have no negative padding
            # but where the convolution itself has.
            options["padding"] = [
                (chance.randint(0, w - 1), chance.randint(0, w - 1)) for w in window
            ]
            if rare.random() < 0.5:
                # Not (-1, 1): XLA:CPU pads nothing where the padding of every dim sums
                # up to zero, on one device.
                options["padding"] = [
                    (-1, 2 * high) if rare.random() < 0.5 else (low, high)
                    for low, high in options["padding"]
                ]
        if self.wrapper == "scan":
            options.update(window_strides=[1] * len(spatial), padding="SAME")
            options.pop("lhs_dilation", None)
        self.options = options

        def apply(x: Any, w: Any) -> Any:
            return lax.conv_general_dilated(x, w, **options)

        x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, self.kernel))
        self.result = jax.eval_shape(apply, x, w).shape
        if math.prod(self.result) == 0:
            self.options = options = {
                "window_strides": (1,) * len(spatial), "padding": "SAME",
                "dimension_numbers": options["dimension_numbers"],
                "feature_group_count": groups,
            }  # fmt: skip
            self.result = jax.eval_shape(apply, x, w).shape

    def weights(self, draw: Any) -> Any:
        fan_in = math.prod(self.kernel[:-1])
        shape = (2, *self.kernel) if self.wrapper == "scan" else self.kernel
        return (draw.normal(size=shape) / math.sqrt(fan_in)).astype("f")

    def __call__(self, x: Any, w: Any) -> Any:
        import jax
        import jax.numpy as jnp
        from jax import lax

        def apply(x: Any, w: Any) -> Any:
            return jnp.tanh(lax.conv_general_dilated(x, w, **self.options))

        if self.wrapper == "remat":
            return jax.checkpoint(apply)(x, w)
        if self.wrapper == "scan":
            return lax.scan(lambda h, w: (apply(h, w), None), x, w)[0]
        return apply(x, w)


def program(seed: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a step of kernels and images, its arguments, and pins of them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    chance, draw = random.Random(seed), np.random.default_rng(seed)
    rare = random.Random(f"rare {seed}")
    rank = chance.choice([1, 2])
    sizes = (4, 6, 8, 16, 24) if rank == 1 else (4, 6, 8, 16)
    spatial = tuple(chance.choice(sizes) for _ in range(rank))
    shape: tuple[int, ...] = (
        chance.choice([1, 1, 2, 3, 4]), *spatial, chance.choice([2, 3, 4, 6, 8]),
    )  # fmt: skip
    x, layers = draw.normal(size=shape).astype("f"), []
    for _ in range(chance.choice([1, 2, 3])):
        layers.append(Layer(chance, shape, rare))
        shape = layers[-1].result

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any, x: Any) -> Any:
            for layer, w in zip(layers, weights, strict=True):
                x = layer(x, w)
            return jnp.sum(jnp.sin(x)), x

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, x)

    mesh = MESHES[seed % len(MESHES)]
    pins = {}
    if chance.random() < 0.4:
        cut = [(d, a) for d, n in enumerate(x.shape) for a, k in mesh.items()
               if n % k == 0 and 0 < d < x.ndim - 1]  # fmt: skip
        if cut:
            dim, axis = chance.choice(cut)
            pins["x"] = jax.P(*[axis if d == dim else None for d in range(x.ndim)])
    weights = [layer.weights(draw) for layer in layers]
    return step, (weights, x), {"mesh": mesh, "pins": pins}


def difference(seed: int) -> float:
    """Return the largest difference between a step as planned and on one device,
    relative to the largest element of an array."""
    import jax
    import numpy as np

    import rhino_jax as rhino

    step, args, options = program(seed)
    sharded = rhino.auto_shard(step, hardware=HARDWARE, progress=False, **options)
    worst = 0.0
    pairs = zip(
        *map(jax.tree.leaves, (jax.jit(step)(*args), sharded(*args))), strict=True
    )
    for want, got in pairs:
        want, got = np.asarray(want), np.asarray(got)
        scale = max(1.0, float(np.abs(want).max(initial=0.0)))
        worst = max(worst, float(np.abs(got - want).max(initial=0.0)) / scale)
    return worst


def run_seeds(seeds: Sequence[int], within_s: float = 120.0) -> dict[int, str]:
    """Run seeds in children; what went wrong with those that do not agree.

    Args:
      seeds: of programs.
      within_s: seconds that one may take.
    """
    from rhino_jax.utils.worker import environment_of_worker

    failed: dict[int, str] = {}
    left = list(seeds)
    while left:
        child = subprocess.run(
            [sys.executable, __file__, *map(str, left)],
            env=environment_of_worker(),
            capture_output=True,
            text=True,
            timeout=within_s * len(left),
        )
        done = [line.split(maxsplit=1) for line in child.stdout.splitlines()]
        failed.update({int(s): what for s, what in done if not what.startswith("ok")})
        left = left[len(done) :]
        if left:  # The child ended early, at the first of these.
            status, lines = child.returncode, child.stderr.strip().splitlines()
            failed[left.pop(0)] = f"exit status {status}: {lines[-1] if lines else ''}"
    return failed


def main(seeds: Sequence[int]) -> None:
    for seed in seeds:
        try:
            worst = difference(seed)
            what = f"{'ok' if worst < 1e-4 else 'differs by'} {worst:.2g}"
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        print(seed, what, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("RHINO_CACHE", "0")
    if "device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    main([int(seed) for seed in sys.argv[1:]])
