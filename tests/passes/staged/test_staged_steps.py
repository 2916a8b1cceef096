"""Steps cut into stages: the same numbers, and little that is sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.staged.sides import sides_of
from rhino_jax.passes.staged.step import TaskKind, ValueKind
from tests.cases import covering
from tests.passes.staged.helpers_staged import (
    check,
    in_equal_parts,
    of_zoo,
    taken_apart,
)
from tests.passes.zoo import random_like, shape


@pytest.mark.parametrize(("stages", "is_compiled"), [(2, True), (3, False)])
def test_an_mlp_is_the_same_in_stages(stages, is_compiled):
    check(*of_zoo("mlp-tiny"), stages, 4, is_compiled)


@pytest.mark.parametrize("options", [{"is_split": True}, {"v": 2}], ids=str)
def test_backward_passes_are_split_and_groups_have_several_chunks(options):
    arguments = of_zoo("mlp-tiny", optimizer="adamw", clip_norm=0.5)
    step = check(*arguments, 2, 4, **options)
    kinds = {task.kind for tasks in step.tasks for task in tasks}
    assert (TaskKind.WEIGHT_GRADIENT in kinds) == ("is_split" in options)
    assert step.chunks == tuple(c % 2 for c in range(2 * options.get("v", 1)))


@pytest.mark.parametrize(
    "clipped",
    [
        lambda g, norm: jnp.where(norm < 1, g, g / norm),
        lambda g, norm: g / jnp.maximum(1, jnp.broadcast_to(norm, g.shape)),
    ],
)
def test_small_state_is_where_its_parameter_is(clipped):
    """Clipping scales it by a number that is made elsewhere."""

    def loss(params, x):
        for name in ("z", "y"):
            x = jnp.tanh(jnp.sin(x @ params[name]))
        return jnp.sum((x * params["a"]) ** 2)

    def train_step(params, mu, x):
        g = jax.grad(loss)(params, x)
        # The square of the last one, which is of the first stage, is added last.
        norm = jnp.sqrt(sum(jnp.sum(g[name] ** 2) for name in ("a", "y", "z")))
        g = jax.tree.map(lambda g: clipped(g, norm), g)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, g)
        return jax.tree.map(lambda p, m: p - m, params, mu), mu

    params = {"a": jnp.ones(64), "y": jnp.eye(64), "z": jnp.eye(64)}
    args = params, jax.tree.map(jnp.zeros_like, params), jnp.ones((8, 64))
    traced = trace(train_step, args, {}, donate_argnums=(0, 1))
    step = check(traced, jax.tree.leaves(args), 3, 4)
    assert step.home[:3] == step.home[3:6] == (2, 1, 0)


def test_nothing_waits_for_gradients_of_weights():
    traced, _ = of_zoo("gpt-tiny-unrolled")
    apart = taken_apart(traced, 4)
    step = in_equal_parts(apart, 2, v=2, is_split=True)
    late = [
        t for tasks in step.tasks for t in tasks if t.kind is TaskKind.WEIGHT_GRADIENT
    ]
    assert len(late) == 4
    made = {key for task in late for key in task.makes}
    assert {key.kind for key in made} == {ValueKind.SUM}
    # Of the first chunk's backward pass nothing is left.
    others = [t for tasks in step.tasks for t in tasks if t.kind is TaskKind.BACKWARD]
    assert not any(key.kind is ValueKind.SUM for t in others for key in t.makes)
    assert 0 not in {task.place for task in others}


@pytest.mark.parametrize(
    ("name", "options"),
    covering(
        [
            ("gpt-tiny", {"is_split": True}),  # Its layers are one op.
            ("gpt-tiny-unrolled", {"is_split": True}),
            ("gpt-tiny-unrolled", {"v": 2}),
            ("unet-tiny", {"is_split": True}),
            ("unet-tiny", {"v": 2}),
        ]
    ),
    ids=str,
)
def test_models_of_the_zoo_are_the_same_in_several_tasks(name, options):
    check(*of_zoo(name), 2, 4, **options)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    "name",
    covering(
        ["rnn-tiny", "gpt-tiny-unrolled", "llama-tiny-unrolled", "t5-tiny", "unet-tiny"]
    ),
)
def test_models_of_the_zoo_are_the_same_in_stages(name, stages):
    check(*of_zoo(name), stages, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny-unrolled", "t5-tiny"])
def test_compiled_models_of_the_zoo_are_the_same_in_stages(name):
    check(*of_zoo(name), 2, 4, is_compiled=True)


def test_clipping_by_the_global_norm_is_an_exchange_of_scalars():
    step = check(*of_zoo("gpt-tiny-unrolled", clip_norm=0.5), 2, 4)
    sent = [s for s in step.sends if s.kind is TaskKind.UPDATE]
    assert sent and all(step.types[s.key].size <= 1024 for s in sent)
    rounds = {t.place for tasks in step.tasks for t in tasks if t.kind == "update"}
    assert len(rounds) > 1


def tied(params, x, y):
    """A weight that is read first and last."""
    h = jnp.tanh(x @ params["w"])
    for p in params["middle"]:
        h = jnp.tanh(h @ p)
    return jnp.mean((h @ params["w"].T - y) ** 2)


def test_a_tied_gradient_is_sent_once_a_step():
    params = {"w": shape(64, 32), "middle": [shape(32, 32)] * 3}

    def step(params, x, y):
        gradients = jax.grad(tied)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    args = random_like((params, shape(8, 64), shape(8, 64)))
    traced = trace(step, args, {}, donate_argnums=(0,))
    made = check(traced, jax.tree.leaves(args), 2, 4)
    large = [s for s in made.sends if made.types[s.key].size == 64 * 32]
    assert [s.key.kind for s in large] == [ValueKind.SUM]
    assert len(made.copies & {(p, 1) for p in range(4)}) == 1


@pytest.mark.parametrize("reduce", [jnp.mean, jnp.sum])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_loss_of_terms_of_several_stages(reduce, is_split):
    """As that of a VAE. Only sums of backward passes are taken apart: forward ops stay
    those that were cut."""

    def loss(weights, x):
        of_rows, h = 0.0, x
        for w in weights:
            h = jnp.tanh(h @ w)
            of_rows = of_rows + jnp.sum(h**2, -1)
        return reduce(of_rows)

    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    args = random_like(([shape(16, 16)] * 4, shape(8, 16)))
    traced = trace(step, args, {}, donate_argnums=(0,))
    check(traced, jax.tree.leaves(args), 4, 4, is_split=is_split)


def test_gradients_are_where_their_weights_are():
    traced, _ = of_zoo("gpt-tiny-unrolled")
    step = in_equal_parts(taken_apart(traced, 4), 2)
    seen = set()
    for tasks in step.tasks:
        for task in tasks:
            if task.kind is TaskKind.UPDATE:
                large = [k for k in task.reads if step.types[k].size > 4096]
                homes = {
                    step.home[k.number] for k in large if k.kind is ValueKind.INPUT
                }
                assert homes <= {task.group}
                seen |= homes
    assert seen == {0, 1}


def test_what_is_free_runs_wherever_it_is_read():
    traced, _ = of_zoo("gpt-tiny-unrolled")
    apart = taken_apart(traced, 4)
    sides = sides_of(apart)
    assert 0 < sum(sides.is_free) < 0.2 * len(sides.is_free)
    step = in_equal_parts(apart, 4)
    # Tokens and masks are not sent: only what weights had a part in.
    assert all(
        jnp.issubdtype(step.types[s.key].dtype, jnp.floating)
        or step.types[s.key].dtype == bool
        for s in step.sends
    )


def test_uneven_micro_batches_are_refused_with_what_works():
    traced, _ = of_zoo("mlp-tiny")
    with pytest.raises(MicrobatchError, match="equal micro-batches") as caught:
        taken_apart(traced, 5)
    rows = int(caught.value.numbers.removeprefix("batch of "))
    fewer, more = 4, 8
    assert rows % fewer == rows % more == 0
    padded = rows + -rows % 5
    assert f"take {fewer} or {more} micro-batches" in caught.value.fix
    assert f"pad the batch to {padded} rows" in caught.value.fix
    for count in (fewer, more):
        assert taken_apart(traced, count).cut.count == count


def test_a_batch_without_divisors_is_padded():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    args = jnp.ones((4, 4)), jnp.ones((5, 4))
    traced = trace(step, args, {}, donate_argnums=(0,))
    with pytest.raises(MicrobatchError, match="no 2 equal") as caught:
        taken_apart(traced, 2)
    assert "take 5 micro-batches, or pad the batch to 6 rows" in caught.value.fix


def test_where_time_does_not_divide_the_batch_behind_it_is_cut():
    """Of data [time, batch, features] either may be, where no op goes along time."""

    def loss(w, x, y):
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    def train_step(w, x, y):
        return w - 0.1 * jax.grad(loss)(w, x, y)

    args = jnp.eye(8), jnp.ones((6, 16, 8)), jnp.ones((6, 16, 8))
    traced = trace(train_step, args, {}, donate_argnums=(0,))
    rows = {count: taken_apart(traced, count).cut.rows for count in (3, 4)}
    assert rows == {3: 6, 4: 16}


def test_what_cannot_be_cut_is_refused_with_a_way_out_that_stages_leave():
    traced = trace(jnp.sort, (jnp.ones(16),), {})
    with pytest.raises(MicrobatchError, match="nothing of") as caught:
        taken_apart(traced, 4)
    assert "`stages=1, microbatches=1`" in caught.value.fix
    assert "loops" not in str(caught.value)
