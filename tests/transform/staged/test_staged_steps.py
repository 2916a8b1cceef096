"""Steps cut into stages: the same numbers, and little that is sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers_staged import check, in_equal_parts, of_zoo

from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import trace
from rhino_jax.transform.staged.apart import take_apart
from rhino_jax.transform.staged.sides import sides_of
from rhino_jax.transform.staged.step import Kind, TaskKind


@pytest.mark.parametrize("stages", [2, 3])
def test_an_mlp_is_the_same_in_stages(stages):
    check(*of_zoo("mlp-tiny"), stages, 4)


@pytest.mark.parametrize("options", [{"is_split": True}, {"v": 2}], ids=str)
def test_backward_passes_are_split_and_groups_have_several_chunks(options):
    arguments = of_zoo("mlp-tiny", optimizer="adamw", clip_norm=0.5)
    step = check(*arguments, 2, 4, **options)
    kinds = {task.kind for tasks in step.tasks for task in tasks}
    assert (TaskKind.WEIGHTS in kinds) == ("is_split" in options)
    assert step.chunks == tuple(c % 2 for c in range(2 * options.get("v", 1)))


def test_small_state_is_where_its_parameter_is():
    """Clipping scales it by a number that is made elsewhere."""

    def loss(params, x):
        for name in ("z", "y"):
            x = jnp.tanh(jnp.sin(x @ params[name]))
        return jnp.sum((x * params["a"]) ** 2)

    def train_step(params, mu, x):
        g = jax.grad(loss)(params, x)
        # The square of the last one, which is of the first stage, is added last.
        norm = jnp.sqrt(sum(jnp.sum(g[name] ** 2) for name in ("a", "y", "z")))
        g = jax.tree.map(lambda g: jnp.where(norm < 1, g, g / norm), g)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, g)
        return jax.tree.map(lambda p, m: p - m, params, mu), mu

    params = {"a": jnp.ones(64), "y": jnp.eye(64), "z": jnp.eye(64)}
    args = params, jax.tree.map(jnp.zeros_like, params), jnp.ones((8, 64))
    traced = trace(train_step, args, {}, donate_argnums=(0, 1))
    step = check(traced, jax.tree.leaves(args), 3, 4)
    assert step.home[:3] == step.home[3:6] == (2, 1, 0)


def test_nothing_waits_for_gradients_of_weights():
    traced, _ = of_zoo("gpt-tiny-unrolled")
    apart = take_apart(traced.closed_jaxpr, traced.program, 4)
    step = in_equal_parts(apart, 2, v=2, is_split=True)
    late = [t for tasks in step.tasks for t in tasks if t.kind is TaskKind.WEIGHTS]
    assert len(late) == 4
    made = {key for task in late for key in task.makes}
    assert {key.kind for key in made} == {Kind.SUM}
    # Of the first chunk's backward pass nothing is left.
    others = [t for tasks in step.tasks for t in tasks if t.kind is TaskKind.BACKWARD]
    assert not any(key.kind is Kind.SUM for t in others for key in t.makes)
    assert 0 not in {task.place for task in others}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"is_split": True}, {"v": 2}], ids=str)
@pytest.mark.parametrize("name", ["gpt-tiny-unrolled", "unet-tiny", "gpt-tiny"])
def test_models_of_the_zoo_are_the_same_in_several_tasks(name, options):
    if name == "gpt-tiny" and "v" in options:
        pytest.skip("its layers are one op")
    check(*of_zoo(name), 2, 4, **options)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    "name",
    ["gpt-tiny-unrolled", "llama-tiny-unrolled", "t5-tiny", "unet-tiny", "rnn-tiny"],
)
def test_models_of_the_zoo_are_the_same_in_stages(name, stages):
    check(*of_zoo(name), stages, 4)


@pytest.mark.slow
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
    keys = jax.random.split(jax.random.key(0), 6)
    params = {
        "w": jax.random.normal(keys[0], (64, 32)) / 8,
        "middle": [jax.random.normal(k, (32, 32)) / 6 for k in keys[1:4]],
    }
    x, y = jax.random.normal(keys[4], (8, 64)), jax.random.normal(keys[5], (8, 64))

    def step(params, x, y):
        gradients = jax.grad(tied)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    args = (params, x, y)
    traced = trace(step, args, {}, donate_argnums=(0,))
    made = check(traced, jax.tree.leaves(args), 2, 4)
    large = [s for s in made.sends if made.types[s.key].size == 64 * 32]
    assert [s.key.kind for s in large] == [Kind.SUM]
    assert len(made.copies & {(p, 1) for p in range(4)}) == 1


@pytest.mark.parametrize("reduce", [jnp.mean, jnp.sum])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_loss_of_terms_of_several_stages(reduce, is_split):
    """As that of a VAE. Only sums of backward passes are taken apart: forward ops stay
    those that were cut."""
    weights = jax.random.normal(jax.random.key(0), (4, 16, 16)) / 4
    x = jax.random.normal(jax.random.key(1), (8, 16))

    def loss(weights, x):
        of_rows, h = 0.0, x
        for w in weights:
            h = jnp.tanh(h @ w)
            of_rows = of_rows + jnp.sum(h**2, -1)
        return reduce(of_rows)

    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    args = ([*weights], x)
    traced = trace(step, args, {}, donate_argnums=(0,))
    check(traced, jax.tree.leaves(args), 4, 4, is_split=is_split)


def test_gradients_are_where_their_weights_are():
    traced, _ = of_zoo("gpt-tiny-unrolled")
    step = in_equal_parts(take_apart(traced.closed_jaxpr, traced.program, 4), 2)
    seen = set()
    for tasks in step.tasks:
        for task in tasks:
            if task.kind is TaskKind.UPDATE:
                large = [k for k in task.reads if step.types[k].size > 4096]
                homes = {step.home[k.number] for k in large if k.kind is Kind.INPUT}
                assert homes <= {task.group}
                seen |= homes
    assert seen == {0, 1}


def test_what_is_free_runs_wherever_it_is_read():
    traced, _ = of_zoo("gpt-tiny-unrolled")
    apart = take_apart(traced.closed_jaxpr, traced.program, 4)
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
        take_apart(traced.closed_jaxpr, traced.program, 5)
    rows = int(caught.value.numbers.removeprefix("batch of "))
    fewer, more = 4, 8
    assert rows % fewer == rows % more == 0
    padded = rows + -rows % 5
    assert f"take {fewer} or {more} micro-batches" in caught.value.fix
    assert f"pad the batch to {padded} rows" in caught.value.fix
    for count in (fewer, more):
        assert take_apart(traced.closed_jaxpr, traced.program, count).cut.count == count


def test_a_batch_without_divisors_is_padded():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    args = jnp.ones((4, 4)), jnp.ones((5, 4))
    traced = trace(step, args, {}, donate_argnums=(0,))
    with pytest.raises(MicrobatchError, match="no 2 equal") as caught:
        take_apart(traced.closed_jaxpr, traced.program, 2)
    assert "take 5 micro-batches, or pad the batch to 6 rows" in caught.value.fix


def test_where_time_does_not_divide_the_batch_behind_it_is_cut():
    """Of data [time, batch, features] either may be, where no op goes along time."""

    def loss(w, x, y):
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    def train_step(w, x, y):
        return w - 0.1 * jax.grad(loss)(w, x, y)

    args = jnp.eye(8), jnp.ones((6, 16, 8)), jnp.ones((6, 16, 8))
    traced = trace(train_step, args, {}, donate_argnums=(0,))
    rows = {
        count: take_apart(traced.closed_jaxpr, traced.program, count).cut.rows
        for count in (3, 4)
    }
    assert rows == {3: 6, 4: 16}


def test_what_cannot_be_cut_is_refused_with_a_way_out_that_stages_leave():
    traced = trace(lambda x: x + 1, (jnp.ones(16),), {})
    with pytest.raises(MicrobatchError, match="nothing of") as caught:
        take_apart(traced.closed_jaxpr, traced.program, 4)
    assert "`stages=1, microbatches=1`" in caught.value.fix
    assert "loops" not in str(caught.value)
