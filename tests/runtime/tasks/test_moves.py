"""Values between groups of unequal size: laid out to leave, and cut into pieces."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from rhino_jax.runtime.tasks.moves import MeshMove, Relaid, leaving
from rhino_jax.runtime.tasks.transfers import Packet


SHAPE = (8, 4)
SPECS = [P(), P("x"), P("stage"), P(("stage", "x")), P("x", "stage"), P(None, "x")]


def groups(large: int = 2) -> tuple[Mesh, Mesh]:
    """Of 2 × `large` devices, and of two."""
    devices = np.array(jax.devices())
    first = devices[: 2 * large].reshape(large, 2)
    return Mesh(first, ("stage", "x")), Mesh(devices[6:].reshape(1, 2), ("stage", "x"))


@pytest.mark.parametrize("is_grown", [False, True], ids=["to fewer", "to more"])
@pytest.mark.parametrize("want", SPECS, ids=str)
@pytest.mark.parametrize("have", SPECS, ids=str)
def test_values_are_the_same_on_groups_of_other_sizes(
    have: Any, want: Any, is_grown: bool
) -> None:
    one, other = groups()[:: -1 if is_grown else 1]
    source, target = NamedSharding(one, have), NamedSharding(other, want)
    x = jnp.arange(32.0).reshape(SHAPE)
    as_sent = leaving(source, target, SHAPE)
    sent = Relaid()(jax.device_put(x, source), source, as_sent)
    move = MeshMove.of("x", x, as_sent, target)
    got = move.here(sent)
    assert got.sharding == target
    np.testing.assert_array_equal(got, x)
    # Every device gets what it is to have and no more.
    size = np.prod(target.shard_shape(SHAPE))
    for a, _, piece in move.routes:
        shard = (
            as_sent.shard_shape(SHAPE)
            if piece is None
            else [stop - start for start, stop in piece]
        )
        assert np.prod(shard) == size and a in one.devices


def test_what_has_all_that_is_wanted_stays_as_it_is() -> None:
    one, other = groups()
    small, large = NamedSharding(other, P("x")), NamedSharding(one, P(("x", "stage")))
    assert leaving(small, large, SHAPE) == small
    assert leaving(large, small, SHAPE) == NamedSharding(one, P("x"))


def test_keys_are_cut_as_other_arrays_are() -> None:
    one, other = groups()
    keys = jax.random.split(jax.random.key(0), 8)
    source, target = NamedSharding(other, P("x")), NamedSharding(one, P(("x", "stage")))
    got = MeshMove.of("key", keys, source, target).here(jax.device_put(keys, source))
    data = jax.random.key_data
    np.testing.assert_array_equal(data(got), data(keys))


def test_what_all_devices_have_goes_to_fewer_in_pieces_of_their_own() -> None:
    one, other = groups(3)
    like = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    moves = (
        MeshMove.of("x", like, NamedSharding(one, P()), NamedSharding(other, P())),
    )
    assert not moves[0].is_straight and not Packet(moves).is_whole
