"""Place arrays on a mesh whose devices may belong, in part or all, to other processes.

`jax.device_put` to a mesh of some of the processes needs all of them to take part. Here
each process places its own devices' shards, and waits for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rhino_jax.errors import ProcessError
from rhino_jax.runtime.processes.agree import is_alone


MAX_HOST_BYTES = 2**28
"""Bytes of arrays of one shape and sharding up to which the host slices them:
`jax.device_put` compiles a program for each shape that it slices on a device, in 35 to
140 ms (XLA:CPU); PCIe 3.0 ×16 moves that many bytes to the host and back in 35."""


def placed(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Place arrays as `jax.device_put`, on meshes of any processes' devices.

    Args:
      arrays: host arrays, arrays of this process's devices, or global ones. Where they
        go to devices of several processes, all of these pass equal arrays.
      shardings: sharding of each.
    Raises:
      ProcessError: parts of an array would have to come from other processes.
    """
    if is_alone():
        return _put(arrays, shardings)
    found: list[Any] = list(arrays)
    usual = [i for i, x in enumerate(arrays) if _is_usual(x, shardings[i])]
    moved = _put([arrays[i] for i in usual], [shardings[i] for i in usual])
    for i, x in zip(usual, moved, strict=True):
        found[i] = x
    for i in {*range(len(found))} - {*usual}:
        found[i] = _placed(arrays[i], shardings[i])
    return found


def away(like: Any, sharding: NamedSharding) -> jax.Array:
    """Return a global array of which this process has no shard.

    Args:
      like: has its shape and dtype.
      sharding: its sharding.
    """
    return assembled(like, sharding, [])


def assembled(like: Any, sharding: NamedSharding, shards: Sequence[Any]) -> jax.Array:
    """Return a global array of this process's shards.

    Args:
      like: has its shape and dtype.
      sharding: its sharding.
      shards: shards of this process's devices, in the mesh's order.
    """
    return jax.make_array_from_single_device_arrays(
        tuple(like.shape), sharding, list(shards), dtype=like.dtype
    )


def here(sharding: NamedSharding) -> list[Any]:
    """Return this process's devices of a mesh, in order."""
    me = jax.process_index()
    return [d for d in sharding.mesh.devices.flat if d.process_index == me]


def _put(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Return `jax.device_put` of arrays, without compiling programs that slice them."""
    sliced = {
        i: (x.shape, x.dtype, sharding)
        for i, (x, sharding) in enumerate(zip(arrays, shardings, strict=True))
        if _is_sliced(x, sharding)
    }
    count = Counter(sliced.values())
    given = [
        np.asarray(x)
        if i in sliced and count[sliced[i]] * x.nbytes <= MAX_HOST_BYTES
        else x
        for i, x in enumerate(arrays)
    ]
    return list(jax.device_put(given, list(shardings)))


def _is_sliced(x: Any, sharding: Any) -> bool:
    """Whether `jax.device_put` slices an array on its only device, and NumPy can."""
    return (
        isinstance(x, jax.Array)
        and not isinstance(x, jax.core.Tracer)
        and len(x.sharding.device_set) == 1
        and x.is_fully_addressable
        and not sharding.is_fully_replicated
        and not x.aval.weak_type
        and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    )


def _is_usual(x: Any, sharding: Any) -> bool:
    processes = {d.process_index for d in sharding.device_set}
    if len(processes) == jax.process_count():
        return True
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    return bool(sharding.is_fully_addressable) and not is_global


def _placed(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    devices = here(sharding)
    if not devices:
        return away(x, sharding)
    wanted = sharding.devices_indices_map(tuple(x.shape))
    parts = _parts(x, [wanted[d] for d in devices])
    if parts is None:
        raise ProcessError(
            "an array is on devices of other processes, and is wanted here.",
            where=f"process {jax.process_index()}",
            numbers=f"{x.dtype}{list(x.shape)}: is {x.sharding}, wanted {sharding}",
            fix="give it as the plan has it: plan.init makes state where it belongs,"
            " plan.put moves what every process has.",
        )
    return assembled(x, sharding, jax.device_put(parts, devices))


def _parts(x: Any, indices: Sequence[Any]) -> list[Any] | None:
    """Return the parts of an array at some indices; None where they are elsewhere."""
    if not isinstance(x, jax.Array):
        return [x[index] for index in indices]
    if x.is_fully_addressable or x.is_fully_replicated:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return [x[index] for index in indices]
        whole = np.asarray(x)
        return [whole[index] for index in indices]
    have = {str(s.index): s.data for s in x.addressable_shards}
    found = [have.get(str(index)) for index in indices]
    return None if any(part is None for part in found) else found
