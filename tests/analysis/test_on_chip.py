"""Which values stay in on-chip memory, by their sizes and by what else is live."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.liveness import Liveness, analyse
from rhino_jax.analysis.on_chip import OnChip, is_kept
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.lowering import OBSERVED


MIB = 2**20
CHIP = Fusing(
    with_matmuls=True,
    stacks_in_place=True,
    on_chip_bytes=128 * MIB,
    loops_on_chip=True,
)


def analysed(
    fn: Any, *args: Any, chip: Fusing = CHIP
) -> tuple[Graph, Liveness, OnChip]:
    graph = inline_regions(trace(fn, args, {}).program)
    live = analyse(graph, chip)
    assert live.on_chip is not None
    return graph, live, live.on_chip


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def written(fn: Any, *args: Any, shards: int = 1) -> list[tuple[int, bool]]:
    """Return, of every value that an op stores, its bytes per shard, and whether they
    are written on the chip."""
    graph, live, on_chip = analysed(fn, *args)
    found = []
    for node in graph.nodes:
        if node.kind is NodeKind.OP and live.is_materialised[node.ports[0].id]:
            assert node.op is not None
            kept = is_kept(on_chip.writes[node.ports[0].id], np.array([1 / shards]))
            size = graph.program.values[node.op.results[0]].bytes // shards
            found.append((size, bool(kept[0])))
    return found


def two_matmuls(x: Any, a: Any, b: Any) -> Any:
    return (x @ a) @ b


def mlp(mib: int) -> tuple[Any, ...]:
    return array(mib * 512, 1024), array(1024, 1024), array(1024, 1024)


def test_a_value_between_two_kernels_stays_where_it_fits() -> None:
    # The result leaves the program.
    for mib, stays in ((8, True), (32, True), (128, False)):
        assert written(two_matmuls, *mlp(mib)) == [
            (mib * MIB, stays), (mib * MIB, False),
        ]  # fmt: skip


def test_shards_stay_where_the_whole_does_not() -> None:
    kept = written(two_matmuls, *mlp(256), shards=4)
    assert kept == [(64 * MIB, True), (64 * MIB, False)]
    assert written(two_matmuls, *mlp(256), shards=2)[0] == (128 * MIB, False)


def test_the_value_with_more_readers_stays() -> None:
    def both(x: Any, y: Any, w: Any) -> Any:
        once, often = x @ w, y @ w
        a, b = often.T @ x, often.T @ y
        return a, b, often.T @ once

    args = array(32 * 1024, 1024), array(32 * 1024, 1024), array(1024, 1024)
    kept = [stays for size, stays in written(both, *args) if size == 64 * MIB]
    assert kept == [False, True]


def test_a_value_stays_in_a_loops_body() -> None:
    def step(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w, None), x, ws)[0]

    found = written(step, array(8192, 1024), array(4, 1024, 1024))
    assert found[0] == (16 * MIB, True)


def stacked_and_read(x: Any, ws: Any) -> Any:
    """Return what one loop makes of what another has stacked."""

    def forward(x: Any, w: Any) -> Any:
        y = jnp.sort(x * w, axis=-1)
        return jnp.tanh(y), jnp.sin(y)

    def backward(x: Any, y: Any) -> Any:
        return jnp.sort(x + y, axis=-1), None

    last, ys = jax.lax.scan(forward, x, ws)
    return jax.lax.scan(backward, last, ys, reverse=True)[0].sum()


def reads_of(fn: Any, *args: Any, chip: Fusing = CHIP) -> dict[str, list[bool]]:
    """Return, by the op that reads, whether each of its reads is on the chip."""
    graph, _, on_chip = analysed(fn, *args, chip=chip)
    found: dict[str, list[bool]] = {}
    for node in graph.nodes:
        if node.kind is NodeKind.OP and node.op is not None:
            kept = [bool(is_kept(s, np.ones(1))[0]) for s in on_chip.reads[node.id]]
            found.setdefault(node.op.name, []).extend(kept)
    return found


def test_stacks_stay_until_another_loop_has_read_them() -> None:
    for mib, stays in ((32, True), (128, False)):
        args = array(mib * 64, 1024), array(8, 1024)
        assert reads_of(stacked_and_read, *args)["add"] == [True, stays]


def test_some_compilers_keep_nothing_between_trips() -> None:
    args = array(2048, 1024), array(8, 1024)
    off = replace(CHIP, loops_on_chip=False)
    assert reads_of(stacked_and_read, *args, chip=off)["add"] == [False, False]


def test_a_carry_stays_with_its_next_value() -> None:
    def step(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return jnp.tanh(jnp.sort(x, axis=-1)), None

        return jax.lax.scan(body, jnp.sin(x), None, length=8)[0]

    for mib, stays in ((40, True), (128, False)):
        assert reads_of(step, array(mib * 512, 1024))["sort"] == [stays]


def test_what_every_trip_reads_stays_to_the_end_of_its_loop() -> None:
    def step(x: Any, ws: Any) -> Any:
        often = jnp.sort(x, axis=-1)

        def body(c: Any, w: Any) -> Any:
            return jnp.sort((often * w).sum(0)), jnp.sort(x * c, axis=-1).sum(0)

        return jax.lax.scan(body, ws[0], ws)

    for mib, stays in ((32, True), (64, False)):
        kept = reads_of(step, array(mib * 512, 1024), array(8, 1024))
        assert stays in kept["mul"]


def test_a_read_after_the_chip_is_full_is_from_hbm() -> None:
    def step(x: Any, w: Any, wide: Any) -> Any:
        early = x @ w
        middle = jnp.sort(jnp.sort(early, axis=-1) @ wide, axis=-1)
        return middle.sum(), (jnp.flip(middle, 0).T @ early).sum()

    wide = array(1024, 2048)
    graph, _, on_chip = analysed(step, array(20480, 1024), array(1024, 1024), wide)
    first, *_, last = [n for n in graph.nodes if n.is_matmul]
    both = np.array([1.0, 0.25])
    assert is_kept(on_chip.writes[first.ports[0].id], both).all()
    # Values of 80 MiB come between; a quarter of all has room.
    assert is_kept(on_chip.reads[last.id][-1], both).tolist() == [False, True]


def test_updated_state_is_written_on_the_chip_where_there_is_much() -> None:
    def update(params: Any, grads: Any) -> Any:
        return [p - g for p, g in zip(params, grads, strict=True)]

    def kept(count: int) -> set[bool]:
        arrays = [array(2048, 1024)] * count
        program = trace(update, (arrays, arrays), {}, donate_argnums=(0,)).program
        graph = inline_regions(program)
        live = analyse(graph, CHIP)
        assert live.on_chip is not None
        made = (n for n in graph.nodes if n.kind is NodeKind.OP)
        return {bool(live.on_chip.writes[n.ports[0].id]) for n in made}

    assert kept(OBSERVED.least_state) == {True}
    assert kept(OBSERVED.least_state - 1) == {False}
