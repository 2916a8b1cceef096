"""What all stages of one program do together is what one device does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rhino_jax._compat import in_current_mesh
from rhino_jax.errors import StageError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Op
from tests.cases import covering
from tests.passes.interpreter import interpret
from tests.passes.spmd_pipeline.helpers_one_program import (
    LAYERS,
    WIDTH,
    assert_equal,
    on_one_stage,
    run_all,
    run_all_compiled,
    traced_step,
)
from tests.passes.staged.helpers_staged import of_zoo, undivided


SCALES = jnp.linspace(0.5, 1.0, WIDTH)


def dense(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w["w"] + w["b"])


def dropped(x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.0)


def with_key(carry: Any, w: Any) -> Any:
    """A layer that hands a random key on."""
    x, key = carry
    key, own = jax.random.split(key)
    return dropped(dense(x, w), own), key


def with_raw_key(carry: Any, w: Any) -> Any:
    x, bits = carry
    x, key = with_key((x, jax.random.wrap_key_data(bits)), w)
    return x, jax.random.key_data(key)


def first(carry: Any) -> Any:
    return carry[0]


STEPS: dict[str, Callable[[], Any]] = {
    "plain": lambda: traced_step(dense),
    "checkpointed": lambda: traced_step(jax.checkpoint(dense)),
    "clipped": lambda: traced_step(
        dense, tx=optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    ),
    "clipped adamw": lambda: traced_step(
        dense, tx=optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    ),
    "layer-wise norms": lambda: traced_step(dense, tx=optax.lamb(1e-2)),
    "factored": lambda: traced_step(
        dense, tx=optax.adafactor(1e-2, min_dim_size_to_factor=8)
    ),
    "dropout": lambda: traced_step(with_key, start=lambda x, key: (x, key), end=first),
    "dropout, raw keys": lambda: traced_step(
        with_raw_key, start=lambda x, key: (x, jax.random.key_data(key)), end=first
    ),
    "shared layers": lambda: traced_step(dense, loops=2),
    "unrolled": lambda: traced_step(dense, unroll=LAYERS),
    "captured array": lambda: traced_step(lambda x, w: dense(x * SCALES, w)),
    "count of layers": lambda: traced_step(
        lambda c, w: (dense(c[0], w) / (1 + c[1]), c[1] + 1),
        start=lambda x, key: (x, 0),
        end=first,
    ),
}


def handed_on(on_stage: Any) -> tuple[list[Op], list[Op]]:
    """What stages send each other on every tick, and once."""
    program = on_stage.program
    every = [op for op in program.ops if op.name == "ppermute"]
    once = [op for op in every if op.id in program.body.ops]
    return [op for op in every if op not in once], once


@functools.cache
def step_of(name: str) -> tuple[Traced, list[Any]]:
    return STEPS[name]()


IN_FOUR = ("plain", "factored", "shared layers")


@pytest.mark.parametrize(
    ("name", "stages", "count"),
    covering(
        [(name, stages, count) for name in STEPS for stages, count in ((2, 4), (4, 8))],
        lambda case: case[1] == 2 or case[0] in IN_FOUR,
    ),
)
def test_equals_one_device(name: str, stages: int, count: int) -> None:
    traced, arrays = step_of(name)
    on_stage = on_one_stage(traced, stages, count)
    assert_equal(traced, run_all(traced, on_stage, arrays), undivided(traced, arrays))


@pytest.mark.parametrize(
    "name",
    covering(
        ["clipped", "clipped adamw", "dropout", "factored", "captured array"],
        ["clipped"],
    ),
)
def test_equals_one_device_where_it_is_compiled(name: str) -> None:
    traced, arrays = step_of(name)
    found = run_all_compiled(traced, on_one_stage(traced, 2, 4), arrays)
    assert_equal(traced, found, undivided(traced, arrays))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "count"),
    [
        (name, stages, count)
        for name in ("gpt-tiny", "llama-tiny")
        for stages, count in ((2, 4), (2, 8), (4, 4), (4, 8))
    ],
)
def test_models_equal_one_device(name: str, stages: int, count: int) -> None:
    traced, arrays = of_zoo(name, num_layers=4, clip_norm=0.5)
    on_stage = on_one_stage(traced, stages, count)
    # One value forward, and one back.
    ticking, _ = handed_on(on_stage)
    assert len(ticking) == 2
    assert_equal(traced, run_all(traced, on_stage, arrays), undivided(traced, arrays))


@pytest.mark.parametrize("name", ["clipped adamw", "dropout"])
def test_layers_lie_where_their_stage_is(name: str) -> None:
    traced, _ = step_of(name)
    on_stage = on_one_stage(traced, 2, 4)
    program = on_stage.program
    for end in (*program.inputs, *program.outputs):
        shape = program.values[end.value].shape
        if "layers" in end.path:
            assert shape[0] == LAYERS // 2, end.path
        elif end.path.endswith("['in']"):
            assert shape == (WIDTH, WIDTH)


def test_no_stack_is_gathered() -> None:
    traced, _ = step_of("clipped adamw")
    on_stage = on_one_stage(traced, 2, 4)
    ticking, once = handed_on(on_stage)
    assert len(ticking) == 2  # One value forward, and one back.
    sent = [on_stage.program.values[v].shape for op in once for v in op.operands]
    assert sent
    assert not [shape for shape in sent if shape[1:] == (WIDTH, WIDTH)]


@pytest.mark.parametrize(
    "stages, count, said",
    [(3, 4, "do not divide into 3"), (4, 2, "multiple of 4"), (2, 6, "6 equal micro")],
)
def test_refuses(stages: int, count: int, said: str) -> None:
    traced, _ = step_of("plain")
    with pytest.raises(StageError, match=said):
        on_one_stage(traced, stages, count)


def test_refuses_layers_written_one_by_one() -> None:
    traced, _ = of_zoo("gpt-tiny-unrolled")
    with pytest.raises(StageError, match=r"no `lax\.scan` over layers") as error:
        on_one_stage(traced, 2, 4)
    assert "microbatches" in error.value.fix


def test_two_steps() -> None:
    traced, arrays = step_of("clipped")
    on_stage = on_one_stage(traced, 2, 4)
    left, right = list(arrays), list(arrays)
    state = [e.state_of for e in traced.program.outputs]
    for _ in range(2):
        outs = run_all(traced, on_stage, left), undivided(traced, right)
        for kept, made in zip((left, right), outs, strict=True):
            for of, x in zip(state, made, strict=True):
                if of is not None:
                    kept[of] = np.asarray(x)
    assert_equal(traced, *outs)


def test_functions_that_an_equation_names_are_moved_to_the_mesh_in_context() -> None:
    """A linear solve has a named tuple of jaxprs."""
    args = jnp.eye(3) + 0.1, jnp.ones((3, 1))
    closed = jax.make_jaxpr(jnp.linalg.solve)(*args)
    (x,) = interpret(in_current_mesh(closed), args)
    np.testing.assert_allclose(x, jnp.linalg.solve(*args))
