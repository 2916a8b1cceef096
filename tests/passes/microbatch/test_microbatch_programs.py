"""Small steps, each with something that meets the batch in its own way."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers_microbatch import check, cut_of
from jax import lax
from microbatch_losses import (
    LINEAR_LOSSES,
    B,
    V,
    balanced_layers,
    balanced_layers_kept,
    by_row_number,
    cross_entropy,
    hidden,
    logits,
    masked,
    smallest,
    step_of,
)

from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.transform import Transform, num_microbatches
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.microbatch import cut_in
from tests.cases import covering
from tests.passes.interpreter import interpret
from tests.passes.zoo import compiled


def checked(loss, counts=(2,), tx=None, has_aux=False, **options):
    step, args = step_of(loss, tx, has_aux)
    return check(step, args, (0, 1), counts, **options)


@pytest.mark.parametrize("loss", LINEAR_LOSSES, ids=lambda f: f.__name__)
def test_one_loop_gives_the_numbers_of_the_undivided_step(loss):
    for cut in checked(loss, (2, 3)):
        assert len(cut.loops) == 1
        assert cut.again_flops == cut.meeting_flops == 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_several_losses_take_one_loop(first):
    """Compiled together: each is an output, their gradients are summed."""
    losses = LINEAR_LOSSES[first::4]

    def loss(p, b):
        each = {f.__name__: f(p, b) for f in losses}
        return sum(each.values()), each

    # One with pieces that do not divide, which takes longer to compile.
    counts = (2 if first else 3,)
    for cut in checked(loss, counts, has_aux=True, run=compiled):
        assert len(cut.loops) == 1
        assert cut.again_flops == cut.meeting_flops == 0


def test_rows_that_find_themselves_are_not_stacked():
    step, args = step_of(by_row_number)
    (loop,) = cut_of(step, args, donate=(0, 1)).loops
    assert {c.how for c in loop.leaving} == {"sum"}


def balanced(p, b):
    h = jax.nn.softmax(hidden(p, b))
    fraction = jnp.mean(h > 0.3, (0, 1))
    return masked(p, b) + jnp.sum(fraction * jnp.mean(h, (0, 1)))


def contrastive(p, b):
    one = b["x"] @ p["w"]
    other = hidden(p, b).mean(1)
    scores = one @ other.T
    labels = jnp.arange(B)
    ways = (scores, scores.T)
    each = [optax.softmax_cross_entropy_with_integer_labels(s, labels) for s in ways]
    return sum(e.mean() for e in each)


def variance(p, b):
    h = b["x"] @ p["w"]
    return jnp.sum((h - h.mean(0)) ** 2)


@pytest.mark.parametrize("run", covering([interpret, compiled]))
def test_a_balancing_loss_takes_two_loops(run):
    for cut in checked(balanced, run=run):
        assert len(cut.loops) == 2 and len(cut.why) == 1


@pytest.mark.parametrize("loss", [balanced_layers, balanced_layers_kept])
def test_a_scan_whose_layers_need_sums_is_split(loss):
    for cut in checked(loss, (3,)):
        assert len(cut.loops) == 2 and not cut.meeting_flops


@pytest.mark.parametrize("loss", [variance, smallest])
def test_rows_that_meet_twice_take_three_loops(loss):
    for cut in checked(loss, kept=0.0):
        assert len(cut.loops) == 3 and len(cut.why) == 2


def test_of_few_numbers_a_row_the_second_meeting_is_outside_of_loops():
    def hardest(p, b):
        return jax.nn.logsumexp(jnp.square(logits(p, b)).sum(-1))

    for cut in checked(hardest):
        assert len(cut.loops) == 2 and not cut.meeting_flops
        rows = [c for c in cut.loops[0].leaving if c.how == "stacked"]
        kept = [cut.program.values[c.value] for c in rows]
        data = max(cut.program.values[v].bytes for v in cut.inputs)
        assert kept and all(v.bytes <= data for v in kept)
    for cut in checked(hardest, kept=0.0):
        assert len(cut.loops) == 3


def test_rows_against_rows_run_on_the_whole_batch_between_two_loops():
    for cut in checked(contrastive, most_meeting=0.9):
        assert len(cut.loops) == 2
        assert 0 < cut.meeting_flops < cut.flops
    step, args = step_of(contrastive)
    found = cut_of(step, args, donate=(0, 1))
    assert isinstance(found, MicrobatchError)
    assert "whole batch at once" in str(found)


def test_predictions_and_counts_leave_the_loop():
    def loss(p, b):
        out = logits(p, b)
        right = jnp.sum(out.argmax(-1) == b["y"])
        best = out.argmax(-1)
        return cross_entropy(p, b), {"right": right, "best": best, "all": out}

    checked(loss, has_aux=True)


def normed(p, b, layers=3):
    h = b["x"]
    for _ in range(layers):
        h = h @ p["w"]
        h = jnp.tanh((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-3))
    return jnp.mean((h @ p["out"]) ** 2)


def decorrelated(p, b):
    """Barlow twins' loss."""
    one, other = (x - x.mean(0) for x in (b["x"] @ p["w"], hidden(p, b).mean(1)))
    one, other = (x * lax.rsqrt(jnp.mean(x**2, 0) + 1e-3) for x in (one, other))
    return jnp.sum((one.T @ other / B - jnp.eye(one.shape[1], other.shape[1])) ** 2)


@pytest.mark.parametrize("loss", [normed, decorrelated])
def test_rows_that_meet_many_times_take_a_loop_each_time(loss):
    for cut in checked(loss, (3,)):
        assert len(cut.loops) > 3 and cut.again_flops <= 2 * cut.flops


@pytest.mark.slow
def test_loops_are_the_same_in_every_process():
    """Sets of states are ordered by hashes of strings, which differ."""
    run = (
        "from test_microbatch_programs import cut_of, normed, step_of\n"
        "step, args = step_of(normed)\n"
        "print([loop.ops for loop in cut_of(step, args, donate=(0, 1)).loops])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", run],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": ":".join(sys.path),
            },
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in "0123"
    }
    assert len(found) == 1


def test_what_would_run_too_often_is_refused_with_op_and_line():
    step, args = step_of(lambda p, b: normed(p, b, layers=12))
    found = cut_of(step, args, donate=(0, 1))
    assert isinstance(found, MicrobatchError)
    assert "test_microbatch_programs.py" in found.where
    assert "loops" in found.numbers and "needs a sum over the batch" in found.numbers
    assert "per_microbatch='normed'" in found.fix


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    ],
    ids=["clip", "multi_steps"],
)
def test_optimizers_run_once(make):
    (cut,) = checked(masked, (4,), tx=make())
    assert len(cut.loops) == 1


@pytest.mark.parametrize("run", covering([interpret, compiled]))
def test_pieces_that_do_not_divide(run):
    for cut in checked(masked, (5,), run=run):
        assert -(-cut.rows // cut.count) * cut.count >= B


def accumulated(p, b):
    """Its user's own micro-batches."""

    def part(total, piece):
        x, y = piece
        return total + jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"] * y[:, None]), None

    parts = [v.reshape(2, B // 2, *v.shape[1:]) for v in (b["x"], b["y"])]
    return lax.scan(part, 0.0, parts)[0] / B


def test_a_users_own_accumulation():
    checked(accumulated, (2,))


def test_a_count_that_cannot_be():
    step, args = step_of(masked)
    for count in (1, B + 1):
        found = cut_of(step, args, count, donate=(0, 1))
        assert isinstance(found, MicrobatchError) and str(B) in found.numbers


def test_a_batch_of_one_is_said_to_be_that():
    step, (params, state, batch) = step_of(cross_entropy)
    one = {k: batch[k][:1] for k in ("x", "y")}
    found = cut_of(step, (params, state, one), 2, donate=(0, 1))
    assert isinstance(found, MicrobatchError) and "batch of 1" in found.what
    assert found.where == "batch['x']" and "first dim of all 2" in found.numbers


def test_sums_of_narrow_floats_are_kept_in_float32():
    def loss(p, b):
        p, b = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (p, b["x"]))
        return jnp.mean(jnp.tanh(b @ p["w"]) @ p["out"]).astype(jnp.float32)

    step, args = step_of(loss)
    check(step, args, (0, 1), (2, 4), rtol=2e-2)


def test_partial_sums_are_not_rounded_by_a_type_of_the_same_size():
    """bfloat16 has fewer digits than float16: 1000.5 is 1000 in it."""

    def step(w, x):
        total = jnp.einsum("bd,be->de", x, jnp.ones_like(x))
        return w + total.astype(jnp.bfloat16).astype(jnp.float32)

    x = jnp.asarray([[1000.5], [-1000], [0], [0]], jnp.float16)
    check(step, (jnp.zeros((1, 1)), x), (0,), (2,))


def test_a_key_that_a_loop_carries():
    """The key is the same in all pieces; what is drawn differs by row."""

    def loss(p, b):
        def layer(carry, w):
            h, key = carry
            key, new = jax.random.split(key)
            keep = jax.random.bernoulli(new, 0.8, h.shape)
            return (jnp.tanh(h @ w) * keep, key), None

        start = b["x"], jax.random.key(7)
        (h, key), _ = lax.scan(layer, start, jnp.stack([p["w"]] * 2))
        return jnp.mean(h**2), key

    checked(loss, (3,), has_aux=True)


@pytest.mark.parametrize(("count", "ran"), [(B - 1, B // 2), (2, 2)])
def test_the_number_of_micro_batches_is_that_of_those_that_run(count, ran):
    """All but the last have as many rows; fewer than asked for may hold the batch."""
    traced = trace(*step_of(masked), {}, donate_argnums=(0, 1))
    choice = json.dumps({"count": count})
    found = apply_passes(traced, [Transform("micro-batches", 1, 1, choice)])
    scans = [op for op in found.program.ops if op.name == "scan"]
    assert [op.call.trip_count for op in scans] == [ran]
    assert num_microbatches(found.program.transforms) == ran


def test_a_plan_may_choose_it():
    traced = trace(*step_of(masked), {}, donate_argnums=(0, 1))
    found = apply_passes(traced, [Transform("micro-batches", 1, 1, '{"count": 4}')])
    scans = [op for op in found.program.ops if op.name == "scan"]
    assert [op.call.trip_count for op in scans] == [4]
    assert found.program.transforms[-1].name == "micro-batches"
    assert [e.path for e in found.program.outputs] == [
        e.path for e in traced.program.outputs
    ]
    sources = {str(op.source) for op in found.program.ops}
    assert any("microbatch_losses.py" in s and "hidden" in s for s in sources)


def elementwise(p, b):
    return jnp.sin(b["x"] * p["w"][0]).mean()


def test_a_step_without_products_runs_in_one_loop():
    (cut,) = checked(elementwise, cheap=4.0)
    assert len(cut.loops) == 1
    # Nothing is made of the whole batch at once, though all of it would be cheap.
    assert cut.meeting_flops == 0
    assert all("sum" == c.how for c in cut.loops[0].leaving)


def running(p, b):
    def cell(total, x):
        total = jnp.tanh(total + jnp.sin(x * p["w"][0]).sum())
        return total, total

    return lax.scan(cell, 0.0, b["x"].sum(1))[1].mean()


def test_what_is_carried_from_row_to_row_is_the_cause():
    step, args = step_of(running)
    error = cut_of(step, args, donate=(0, 1))
    assert isinstance(error, MicrobatchError)
    assert "carries something from row to row" in str(error)
    assert "not linear" not in str(error)


def summed_in_a_loop(p, b):
    """A loop over rows that carries a masked sum, a maximum and a histogram."""

    def cell(carry, row):
        total, most, counts = carry
        loss = jnp.sin(row["x"] * p["w"][0]).sum()
        total += jnp.where(row["y"] > 3, 0, loss)
        return (
            total,
            jnp.maximum(most, lax.stop_gradient(loss)),
            counts.at[row["y"]].add(loss),
        ), loss

    start = 0.5, -jnp.inf, jnp.ones(V)
    rows = {"x": b["x"], "y": b["y"]}
    (total, most, counts), losses = lax.scan(cell, start, rows)
    return total / B + counts.mean(), (most, losses)


def test_a_scan_over_the_batch_that_accumulates_makes_fewer_trips():
    for cut in checked(summed_in_a_loop, (2, 3), has_aux=True):
        assert len(cut.loops) == 1


def printed(p, b):
    def layer(x, w):
        x = jnp.tanh(x @ w)
        jax.debug.print("mean {m}", m=x.mean())
        return x, None

    return lax.scan(layer, b["x"], jnp.stack([p["w"]] * 2))[0].mean()


def test_a_mean_that_a_loop_prints_is_refused_with_its_line():
    step, args = step_of(printed)
    error = cut_of(step, args, donate=(0, 1))
    assert isinstance(error, MicrobatchError)
    assert "`debug_print`" in error.what
    line = printed.__code__.co_firstlineno + 3
    assert f"test_microbatch_programs.py:{line}" in error.where


def balanced_and_printed(p, b):
    """Prints the sum of a weight in every layer of a scan that needs sums."""

    def wrap(layer):
        def printing(h, w):
            jax.debug.print("{}", w.sum())
            return layer(h, w)

        return printing

    return balanced_layers(p, b, wrap)


def test_a_scan_that_is_split_prints_in_one_of_both():
    step, args = step_of(balanced_and_printed)
    traced = trace(step, args, {}, donate_argnums=(0, 1))
    cut = apply_passes(traced, [cut_in(2)])
    prints = [op.name for op, _ in cut.program.walk() if op.name == "debug_print"]
    assert len(prints) == 1


def by_split(z, rows):
    return jnp.split(z, 2)[::-1]


def by_slices(z, rows):
    return z[rows:], z[:rows]


def by_reshape(z, rows):
    return z.reshape(2, rows, -1)


@pytest.mark.parametrize("apart", [by_split, by_slices, by_reshape])
def test_batches_run_concatenated(apart):
    """As chosen and rejected sequences, real and generated images, two views."""

    def step(w, pairs):
        def loss(w):
            both = jnp.concatenate([pairs["chosen"], pairs["rejected"]])
            one, other = apart(jnp.tanh(both @ w[0]) @ w[1], len(pairs["chosen"]))
            made = jnp.full_like(one, w[1].sum())
            twice = jnp.concatenate([one, made, other])[len(one) :]
            return jnp.mean(jax.nn.log_sigmoid(one - other)) + jnp.mean(twice**2)

        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(6, 5), (5, 1), (4, 6), (4, 6)]
    one, other, *rows = map(jax.random.normal, keys, shapes)
    pairs = dict(zip(["chosen", "rejected"], rows, strict=True))
    for cut in check(step, ((one, other), pairs), (0,), (2, 3)):
        assert len(cut.loops) == 1 and cut.again_flops == cut.meeting_flops == 0


def test_rows_of_concatenated_batches_do_not_shift():
    def step(w, x, y):
        def loss(w):
            z = jnp.tanh(jnp.concatenate([x, y]) @ w)[1 : 1 + len(x)]
            return jnp.mean(z * x)

        return w - jax.grad(loss)(w)

    keys = jax.random.split(jax.random.key(0), 3)
    args = map(jax.random.normal, keys, [(6, 6), (4, 6), (4, 6)])
    check(step, tuple(args), (0,), (2,))
