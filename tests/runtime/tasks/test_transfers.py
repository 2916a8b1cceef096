"""What is transferred between groups: which shards, and under which number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from rhino_jax.runtime.tasks.moves import MeshMove
from rhino_jax.runtime.tasks.transfers import Packet


def meshes() -> tuple[Mesh, Mesh]:
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    return Mesh(devices[0], ("a", "b")), Mesh(devices[1], ("a", "b"))


def move(spec: Any, target: Any = None, dtype: Any = jnp.float32) -> MeshMove:
    one, other = meshes()
    like = jax.ShapeDtypeStruct((8, 4), dtype)
    into = spec if target is None else target
    return MeshMove.of("x", like, NamedSharding(one, spec), NamedSharding(other, into))


@pytest.mark.parametrize("spec", [P(), P("a"), P("b", "a"), P(("a", "b"))], ids=str)
def test_every_shard_goes_to_its_own_place(spec: Any) -> None:
    found = move(spec)
    assert found.is_straight and len(found.routes) == 4


def test_what_every_device_has_comes_from_its_own_place_too() -> None:
    one, other = meshes()
    whole, half = NamedSharding(one, P()), NamedSharding(other, P())
    found = MeshMove.of("x", jax.ShapeDtypeStruct((), jnp.int32), whole, half)
    assert [a.id for a, *_ in found.routes] == [0, 1, 2, 3]


def test_a_shard_that_no_device_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no shard"):
        move(P("a"), P())


def test_numbers_tell_what_and_when() -> None:
    base, packets = 7, [Packet((move(P("a")),)), Packet((move(P("b")),))]
    packets.append(Packet((move(P("a"), dtype=jnp.int32),)))
    numbers = {
        packet.number(base, count, source, target)
        for packet in packets
        for count in range(50)
        for source, target in ((0, 1), (1, 0), (0, 2))
    }
    assert len(numbers) == 3 * 50 * 3
    assert all(0 <= number < 1 << 62 for number in numbers)
