"""Permutes that stand for a gather or a scatter, and those that do not."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from rhino_jax.verify.hlo.collectives.groups import map_mesh
from rhino_jax.verify.hlo.collectives.read import CollectiveReader
from rhino_jax.verify.hlo.module import parse_module
from tests.verify.hlo.collectives_of import read_collectives


NAME = "jit(f)/dot_general"


def ring(size: int, step: int = 1) -> str:
    pairs = ",".join(f"{{{i},{(i + step) % size}}}" for i in range(size))
    return f"source_target_pairs={{{pairs}}}"


def permute(name: str, operand: str, pairs: str, op_name: str = NAME) -> str:
    return (
        f"  %{name} = f32[64]{{0}} collective-permute(%{operand}), {pairs},"
        f' metadata={{op_name="{op_name}"}}'
    )


def total(*names: str, name: str = "sum") -> str:
    first, second = names
    return f"  %{name} = f32[64]{{0}} add(%{first}, %{second})"


def text_of(size: int, *lines: str) -> str:
    return "\n".join(
        [
            f"HloModule m, is_scheduled=true, num_partitions={size}",
            "ENTRY %main (p: f32[64], q: f32[64]) -> f32[64] {",
            "  %p = f32[64]{0} parameter(0)",
            "  %q = f32[64]{0} parameter(1)",
            f'  %dot = f32[64]{{0}} dot(%p, %q), metadata={{op_name="{NAME}"}}',
            "  %zero = f32[] constant(0)",
            "  %empty = f32[64]{0} broadcast(%zero), dimensions={}",
            *lines,
            "  ROOT %r = f32[64]{0} negate(%p)",
            "}",
        ]
    )


def read(size: int, *lines: str):
    found = read_collectives(text_of(size, *lines), (("x", size),))
    return [(c.kind, c.count, c.bytes // 256) for c in found]


def chain(size: int, first: str = "p", count: int | None = None, **kwargs) -> list[str]:
    """`count` permutes, each of what the one before passed on."""
    names = [first, *(f"{first}.{i}" for i in range(count or size - 1))]
    return [
        permute(new, old, ring(size), **kwargs)
        for old, new in itertools.pairwise(names)
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_one_way_round_a_value_that_all_have_seen_is_gathered(size: int) -> None:
    assert read(size, *chain(size)) == [("all-gather", 1, size - 1)]


@pytest.mark.parametrize("size", [3, 4, 5])
def test_both_ways_round(size: int) -> None:
    up = chain(size, count=size // 2)
    down = [permute("d.0", "p", ring(size, -1))]
    down += [
        permute(f"d.{i}", f"d.{i - 1}", ring(size, -1))
        for i in range(1, size - 1 - size // 2)
    ]
    assert read(size, *up, *down) == [("all-gather", 1, size - 1)]


def test_each_permute_is_a_part_of_one_gather() -> None:
    both_ways = [*chain(4, count=2), permute("d", "p", ring(4, -1))]
    module = parse_module(text_of(4, *both_ways))
    reader = CollectiveReader(module, map_mesh((("x", 4),), None))
    (whole,) = reader.read_all()
    assert reader.windowed == dict.fromkeys(["p.0", "p.1", "d"], (whole, 3))


def test_two_gathers_of_one_operation() -> None:
    assert read(4, *chain(4, "p"), *chain(4, "q")) == [("all-gather", 2, 6)]


def test_a_copy_between_does_not_matter() -> None:
    lines = [
        permute("a", "p", ring(3)),
        "  %b = f32[64]{0} copy(%a)",
        permute("c", "b", ring(3)),
    ]
    assert read(3, *lines) == [("all-gather", 1, 2)]


def scatter(first: str) -> list[str]:
    """Sums of four devices, one way round."""
    return [
        permute("a", first, ring(4)),
        total("a", "dot", name="a.sum"),
        permute("b", "a.sum", ring(4)),
        total("b", "dot", name="b.sum"),
        permute("c", "b.sum", ring(4)),
        total("c", "dot"),
    ]


def test_sums_that_are_passed_on_are_scattered() -> None:
    assert read(4, *scatter("dot")) == [("reduce-scatter", 1, 3)]
    empty = [permute("z", "empty", ring(4)), total("z", "dot", name="z.sum")]
    assert read(4, *empty, *scatter("z.sum")) == [("reduce-scatter", 1, 4)]


def test_a_gather_and_a_scatter_of_one_operation() -> None:
    found = read(4, *chain(4), *scatter("dot"))
    assert sorted(found) == [("all-gather", 1, 3), ("reduce-scatter", 1, 3)]


@pytest.mark.parametrize(
    "lines",
    [
        chain(4, count=2),  # one device's value is not seen
        chain(4, count=4),  # one's own comes back
        chain(4, op_name="jit(f)/shard_map/ppermute"),  # the user's own
        [permute("a", "p", "source_target_pairs={{0,1},{1,0}}")],  # only two devices
        [permute("a", "p", "source_target_pairs={{0,0},{1,2},{2,1},{3,3}}")],
        [permute("a", "empty", ring(4))],
    ],
)
def test_other_permutes_stay_permutes(lines: list[str]) -> None:
    assert {kind for kind, _, _ in read(4, *lines)} == {"collective-permute"}


def test_a_ring_that_the_user_wrote_stays_permutes() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def body(q, k):
        total = q @ k.T
        for _ in range(7):
            k = jax.lax.ppermute(k, "x", [(i, (i + 1) % 8) for i in range(8)])
            total = total + q @ k.T
        return total

    fn = jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    text = jax.jit(fn).lower(*[jnp.zeros((64, 32))] * 2).compile().as_text()
    found = read_collectives(text, (("x", 8),))
    assert [(c.kind, c.bytes) for c in found] == [
        ("collective-permute", 8 * 32 * 4)
    ] * 7
