"""What three compilers made of programs whose traffic is known in closed form."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

from rhino_jax.plan.records import traffic_of
from rhino_jax.verify.hlo.module import parse_module
from rhino_jax.verify.hlo.records import CompiledCollective
from tests.verify.hlo import hlo_programs as programs
from tests.verify.hlo.collectives_of import read_collectives
from tests.verify.hlo.hlo_programs import (
    BATCH,
    GPT_LAYERS,
    GPT_VOCABULARY,
    GPT_WIDTH,
    HIDDEN,
    LAYERS,
    MODEL,
    ROWS,
    SEQUENCE,
    WIDTH,
)


HLO = Path(__file__).parent
BF16_BYTES, F32_BYTES = 2, 4
Counts = dict[tuple[str, tuple[str, ...]], tuple[int, int]]


def text_of(name: str) -> str:
    return gzip.decompress((HLO / f"{name}.hlo.gz").read_bytes()).decode()


def sizes_of(name: str) -> tuple[int, int]:
    nx, ny = re.search(r"\.(\d+)x(\d+)\.jax", name).groups()
    return int(nx), int(ny)


def read(name: str) -> tuple[CompiledCollective, ...]:
    nx, ny = sizes_of(name)
    return read_collectives(text_of(name), (("x", nx), ("y", ny)))


def counts(collectives) -> Counts:
    totals = traffic_of(collectives).items()
    return {key: (total.count, total.bytes) for key, total in totals}


def one_of_each(nx: int, ny: int) -> Counts:
    whole = WIDTH * WIDTH * F32_BYTES
    n = nx * ny
    return {
        ("all-reduce", ("x",)): (1, 2 * (nx - 1) * whole // nx),
        ("reduce-scatter", ("y",)): (1, (ny - 1) * whole // ny),
        ("all-gather", ("y",)): (1, (ny - 1) * whole // ny),
        ("all-to-all", ("x",)): (1, (nx - 1) * whole // nx),
        ("collective-permute", ("y",)): (1, whole),
        ("all-reduce", ("x", "y")): (1, 2 * (n - 1) * whole // n),
    }


def scanned(nx: int, ny: int) -> Counts:
    weight = WIDTH * WIDTH * BF16_BYTES
    rows = ROWS // nx * WIDTH * BF16_BYTES
    return {
        ("all-gather", ("y",)): (LAYERS, LAYERS * (ny - 1) * weight // ny),
        ("reduce-scatter", ("y",)): (LAYERS, LAYERS * (ny - 1) * rows // ny),
        ("collective-permute", ("x",)): (LAYERS, LAYERS * rows),
        ("all-to-all", ("y",)): (LAYERS, LAYERS * (ny - 1) * rows // ny),
    }


def nested(nx: int, ny: int) -> Counts:
    rows = ROWS // nx * WIDTH * BF16_BYTES
    count = 3 * LAYERS
    return {("all-reduce", ("y",)): (count, count * 2 * (ny - 1) * rows // ny)}


def sharded_weights(nx: int, ny: int, scatter: str = "reduce-scatter") -> Counts:
    n = nx * ny
    moved = LAYERS * (n - 1) * WIDTH * WIDTH * BF16_BYTES // n
    ways = 2 if scatter == "all-reduce" else 1
    return {
        ("all-gather", ("x", "y")): (LAYERS, moved),
        (scatter, ("x", "y")): (LAYERS, ways * moved),
    }


def ring(nx: int, ny: int) -> Counts:
    return {("collective-permute", ("y",)): (ny, ROWS * WIDTH * BF16_BYTES)}


def halo(nx: int, ny: int) -> Counts:
    row = 8 // nx * 256 * 64 * BF16_BYTES
    return {("collective-permute", ("y",)): (2, 2 * row)}


EXACT = [
    ("one_of_each.v5e-4x4.4x4.jax-0.10.2", one_of_each),
    ("one_of_each.tpu7x-2x2x2.4x4.jax-0.12.0.1", one_of_each),
    ("one_of_each.h100-8.2x4.jax-0.10.2", one_of_each),
    ("one_of_each.h100-16.2x8.jax-0.12.0.1", one_of_each),
    ("scanned.v5e-4x4.4x4.jax-0.10.2", scanned),
    ("scanned.h100-8.2x4.jax-0.10.2", scanned),
    ("scanned.h100-16.2x8.jax-0.12.0.1", scanned),
    ("nested.v5e-4x4.4x4.jax-0.10.2", nested),
    ("nested.h100-16.2x8.jax-0.12.0.1", nested),
    ("sharded_weights.tpu7x-2x2x2.4x4.jax-0.12.0.1", sharded_weights),
    ("sharded_weights.h100-16.2x8.jax-0.12.0.1", sharded_weights),
    ("ring.v5e-4x4.4x4.jax-0.10.2", ring),
    ("ring.h100-8.2x4.jax-0.10.2", ring),
    ("halo.v5e-4x4.4x4.jax-0.10.2", halo),
    ("halo.h100-16.2x8.jax-0.12.0.1", halo),
]


@pytest.mark.parametrize(("name", "expected"), EXACT)
def test_traffic_is_what_the_program_says(name: str, expected) -> None:
    assert counts(read(name)) == expected(*sizes_of(name))


def test_v5e_scatters_by_an_all_reduce_and_moves_twice_as_much() -> None:
    name = "sharded_weights.v5e-4x4.4x4.jax-0.10.2"
    assert counts(read(name)) == sharded_weights(4, 4, scatter="all-reduce")


def test_between_slices_transfers_go_through_the_hosts() -> None:
    """Two slices of 8 along x: the last sum is scattered, summed and gathered."""
    whole = WIDTH * WIDTH * F32_BYTES
    assert counts(read("one_of_each.v5e-2x2x4.2x8.jax-0.10.2")) == {
        ("all-reduce", ("x",)): (2, whole + whole // 8),
        ("reduce-scatter", ("y",)): (2, 2 * 7 * whole // 8),
        ("all-gather", ("y",)): (2, 2 * 7 * whole // 8),
        ("all-to-all", ("x",)): (1, whole // 2),
        ("collective-permute", ("y",)): (1, whole),
    }


# Both ways round, XLA:TPU sends n + 1 pieces, not n - 1: two more than it needs, as
# the last pieces that are passed on are not used (gather), or the first are empty
# (scatter). Unrolled gathers leave them out. XLA:GPU goes one way, n - 1 times.
ROWS_BYTES = BATCH * SEQUENCE * MODEL * BF16_BYTES
WEIGHT_BYTES = MODEL * HIDDEN * BF16_BYTES
WINDOWED = [
    ("gather_rows.v5e-2x4.1x8.jax-0.10.2", "all-gather", "y", 1, 9, ROWS_BYTES // 8),
    (
        "gather_rows.h100-16.2x8.jax-0.12.0.1",
        "all-gather",
        "y",
        1,
        7,
        ROWS_BYTES // 16,
    ),
    (
        "scatter_rows.v5e-2x4.1x8.jax-0.10.2",
        "reduce-scatter",
        "y",
        1,
        9,
        ROWS_BYTES // 8,
    ),
    (
        "gather_weight.v5e-4x4.4x4.jax-0.10.2",
        "all-gather",
        "x",
        1,
        3,
        WEIGHT_BYTES // 16,
    ),
    (
        "scatter_weight.v5e-4x4.4x4.jax-0.10.2",
        "reduce-scatter",
        "x",
        1,
        5,
        WEIGHT_BYTES // 16,
    ),
    (
        "sequence_parallel.v5e-2x4.1x8.jax-0.10.2",
        "all-gather",
        "y",
        3,
        9,
        ROWS_BYTES // 8,
    ),
    (
        "sequence_parallel.v5e-2x4.1x8.jax-0.10.2",
        "reduce-scatter",
        "y",
        3,
        9,
        ROWS_BYTES // 8,
    ),
]


@pytest.mark.parametrize(
    ("name", "kind", "axis", "count", "permutes", "piece_bytes"), WINDOWED
)
def test_windowed_products_are_what_they_stand_for(
    name: str, kind: str, axis: str, count: int, permutes: int, piece_bytes: int
) -> None:
    found = read(name)
    assert "collective-permute" not in {c.kind for c in found}
    (window,) = (c for c in found if c.kind == kind)
    assert (window.axes, window.count) == ((axis,), count)
    assert window.bytes == count * permutes * piece_bytes
    assert window.reason == f"decomposed into a windowed loop of {permutes} permutes"
    assert window.op.endswith("dot_general")
    assert window.source.startswith("hlo_programs.py:")


def test_pairs_that_stay_whole_move_no_more_than_they_must() -> None:
    found = counts(read("sequence_parallel.v5p-2x2x4.4x4.jax-0.12.0.1"))
    moved = 3 * 3 * (ROWS_BYTES // 4) // 4
    assert found == {
        ("all-gather", ("y",)): (3, moved),
        ("reduce-scatter", ("y",)): (3, moved),
    }


# Of a layer: four weights of WIDTH × WIDTH and two that are four times as wide.
GPT_WEIGHTS_BYTES = (4 + 2 * 4) * GPT_WIDTH * GPT_WIDTH * BF16_BYTES


def test_a_training_step_on_tpu() -> None:
    found = read("gpt.v5e-4x4.4x4.jax-0.10.2")
    totals = counts(found)
    gathered = 3 * GPT_WEIGHTS_BYTES // 16
    # Six weights per layer, forward and, as the layers are rematerialised, backward.
    assert totals["all-gather", ("x",)] == (
        2 * 6 * GPT_LAYERS,
        2 * GPT_LAYERS * gathered,
    )
    count, moved = totals["reduce-scatter", ("x",)]
    assert count == 6 * GPT_LAYERS
    # Unrolled scatters may send empty pieces first: 5 pieces for 3.
    assert GPT_LAYERS * gathered <= moved <= GPT_LAYERS * gathered * 5 // 3
    # Per layer: two sums forward, one again, four of the gradients of matmuls'
    # inputs, three of them combined; then those of embedding, logits and softmax.
    rows = BATCH // 4 * SEQUENCE
    sums = (7 * GPT_LAYERS + 2) * rows * GPT_WIDTH * BF16_BYTES
    softmax = rows * (BF16_BYTES + F32_BYTES)
    assert totals["all-reduce", ("y",)] == (
        5 * GPT_LAYERS + 4,
        2 * 3 * (sums + softmax) // 4,
    )
    embedding = GPT_VOCABULARY // 4 * GPT_WIDTH * BF16_BYTES
    assert totals["all-reduce", ("x",)] == (2, 2 * 2 * 3 * embedding // 4)
    assert set(totals) == {
        ("all-gather", ("x",)),
        ("reduce-scatter", ("x",)),
        ("all-reduce", ("x",)),
        ("all-reduce", ("y",)),
    }


def test_chains_of_fusions_are_asynchronous_and_count_once() -> None:
    found = read("gpt.v5e-4x4.4x4.jax-0.10.2")
    text = text_of("gpt.v5e-4x4.4x4.jax-0.10.2")
    parts = re.findall(r'channel_id=(\d+).*chain_id="(\d+)"', text)
    chains = set(parts)
    assert len(parts) > 3 * len(chains) > 0
    plain = [c for c in found if c.kind == "all-gather" and not c.reason]
    assert sum(c.is_async for c in plain) >= len(chains)
    assert all(c.count == GPT_LAYERS for c in plain)


def test_a_training_step_on_gpu() -> None:
    totals = counts(read("gpt.h100-8.2x4.jax-0.10.2"))
    moved = GPT_LAYERS * (GPT_WEIGHTS_BYTES // 4) // 2
    # Several weights are combined into one transfer.
    assert totals["all-gather", ("x",)] == (2 * GPT_LAYERS, 2 * moved)
    assert totals["reduce-scatter", ("x",)] == (GPT_LAYERS, moved)


def test_one_parse_serves_several_readers() -> None:
    name = "scanned.v5e-4x4.4x4.jax-0.10.2"
    module = parse_module(text_of(name))
    assert read_collectives(module, (("x", 4), ("y", 4))) == read(name)


def test_overlap_is_what_the_schedule_says() -> None:
    def overlapped(name: str) -> set[str]:
        return {c.kind for c in read(name) if c.is_async}

    # Everything depends on what came before: nothing can run beside it.
    for name, _ in EXACT[:4]:
        assert overlapped(name) == set()
    assert overlapped("ring.v5e-4x4.4x4.jax-0.10.2") == {"collective-permute"}
    assert overlapped("ring.h100-8.2x4.jax-0.10.2") == {"collective-permute"}
    assert overlapped("sharded_weights.h100-16.2x8.jax-0.12.0.1") == {
        "all-gather",
        "reduce-scatter",
    }


# XLA:CPU computes in float32 where the program says bfloat16.
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 8)])
@pytest.mark.parametrize(("program", "wider"), [(one_of_each, 1), (ring, 2), (halo, 2)])
def test_the_same_programs_on_cpu(program, wider: int, shape: tuple[int, int]) -> None:
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    lowered = programs.lower(getattr(programs, program.__name__), mesh)
    text = lowered.compile().as_text()
    axes = tuple(zip(("x", "y"), shape, strict=True))
    expected = {}
    for (kind, over), (count, moved) in program(*shape).items():
        key = kind, tuple(a for a in over if dict(axes)[a] > 1)
        if key[1]:
            before = expected.get(key, (0, 0))
            expected[key] = before[0] + count, before[1] + wider * moved
    assert counts(read_collectives(text, axes)) == expected
