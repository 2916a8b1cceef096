"""Run a plan and compare its results with those of one device.

`Plan.check` runs the program twice, on copies of the arguments: sharded as planned,
over real or emulated devices, and by `jax.jit` on one of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.sharding import AxisType, Mesh

from rhino_jax._compat import fused_attention_traced, open_jaxpr
from rhino_jax.errors import MeshError, TraceError
from rhino_jax.frontend.call import Call, split_call
from rhino_jax.frontend.leaves import is_python_scalar
from rhino_jax.frontend.rules.elementwise import ANNOTATIONS
from rhino_jax.frontend.trace import Traced, flat_function
from rhino_jax.ir.transform import MICROBATCHES, Transform, chosen, through_own_sums
from rhino_jax.passes.apply import apply_passes
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.trees import with_mesh
from rhino_jax.runtime.bound import Bound
from rhino_jax.runtime.buffers import copied
from rhino_jax.runtime.meshes import can_run
from rhino_jax.runtime.sharded import sharded_by, unbound
from rhino_jax.runtime.storage import dims_of, in_order
from rhino_jax.utils.progress import Progress
from rhino_jax.verify.places import emulated_mesh
from rhino_jax.verify.results.check import Check, ComparedLeaf, compare
from rhino_jax.verify.rounding import with_other_rounding
from rhino_jax.verify.verification import planned_parameters


ASKS_FOR_A_MESH = ANNOTATIONS | {"shard_map"}
"""Primitives that a program can only contain within a mesh context."""


# XLA omits conversions to 16 bits and back where it may (xla/xla.proto,
# xla_allow_excess_precision); in a sharded program, with its partial sums, it often
# cannot.
_ROUNDING = {"xla_allow_excess_precision": False}

RUNS = 4
"""Runs with other last bits: in one, a leaf of one number may be equal by chance."""


def check(
    plan: PlanData,
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    tolerance: float | None = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
) -> Check:
    """Run `fn` as planned and on one device, and compare; see `Plan.check`."""
    what, started = "`plan.check`", time.monotonic()
    fn, args = unbound(fn, args)
    parameters = planned_parameters(
        plan,
        fn,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        what=what,
    )
    mesh, devices = _mesh_of(plan, what)
    bound = sharded_by(parameters, with_mesh(plan, mesh), what).bound(*args, **kwargs)
    call = split_call(parameters, args, kwargs, what)
    _check_arrays(call, what)
    arrays = [in_order(x, dims_of(x), ()) for x in call.leaves.arrays]
    arrays = [_whole(x) for x in arrays]
    traced = bound.traced
    # Statistics per micro-batch are computed per micro-batch on one device, too.
    own = through_own_sums(plan.transforms) or _of_stages(plan)
    if own:
        flat, consts = _as_traced(apply_passes(traced, own))
    elif traced.captured:
        # Calling a function again would mutate the references that it captures.
        flat, consts = _as_traced(traced)
    else:
        flat, consts = flat_function(parameters, call), []
    with _progress(plan, "on one device"):
        single = _on_one_device(bound, flat, [*arrays, *consts])
    rounded: list[list[Any]] = []
    with _progress(plan, "as planned"):
        planned = _as_planned(bound, arrays)
    paths = [*traced.result.array_paths]
    if traced.written is not None:
        paths += traced.written.paths(len(paths))
    paths += [f"out: {traced.captured.names[k]}" for k in traced.captured.written]

    def compared() -> list[ComparedLeaf]:
        every = zip(paths, planned, single, strict=True)
        return [
            compare(path, a, b, tolerance, [run[n] for run in rounded])
            for n, (path, a, b) in enumerate(every)
        ]

    leaves = compared()
    if tolerance is None and not all(leaf.ok for leaf in leaves):
        with _progress(plan, "on one device, rounded elsewhere"):
            rounded = _rounded_elsewhere(bound, flat, [*arrays, *consts])
        leaves = compared()
    leaves.sort(key=lambda x: (x.ok, -x.relative / (x.tolerance or 1.0)))
    return Check(
        program_name=plan.program_name,
        mesh_axes=plan.mesh_axes,
        devices=devices,
        leaves=tuple(leaves),
        not_compared=(
            *((traced.result.paths[p], "no array") for p, _ in traced.result.statics),
            *(
                (leaf.path, f"{1 - leaf.share:.0%} of it is in other processes")
                for leaf in leaves
                if leaf.share < 1
            ),
        ),
        seconds=time.monotonic() - started,
    )


def _progress(plan: PlanData, how: str) -> AbstractContextManager[None]:
    """Return a context that shows which of the runs takes the time."""
    doing = f"checking `{plan.program_name}` {how}"
    return Progress(doing=doing, is_enabled=jax.process_index() == 0).ticking()


def _of_stages(plan: PlanData) -> tuple[Transform, ...]:
    """Return the plan's passes with the pipeline's micro-batches as one more.

    Empty where no statistics are computed per micro-batch.
    """
    pipeline = plan.pipeline
    if pipeline is None or not pipeline.per_microbatch:
        return ()
    choice = {
        "count": pipeline.micro_batches,
        "per_microbatch": list(pipeline.per_microbatch),
    }
    return (*plan.transforms, chosen(MICROBATCHES, choice))


def _as_traced(traced: Traced) -> tuple[Any, list[Any]]:
    """Return the traced program as a function of flat arrays and then its captured
    arrays, and these."""
    jaxpr = open_jaxpr(traced.closed_jaxpr)
    count = len(jaxpr.invars)

    def run(*arrays: Any) -> list[Any]:
        return eval_jaxpr(jaxpr, arrays[count:], *arrays[:count])

    return run, [_whole(x) for x in traced.consts]


def _mesh_of(plan: PlanData, what: str) -> tuple[Mesh, str]:
    """Return a mesh to run on, and its description: the plan's, or an emulated one.

    Raises:
      MeshError: this process cannot emulate that many devices.
    """
    mesh = plan.mesh
    if can_run(mesh):
        return mesh, f"{mesh.size} {mesh.devices.flat[0].device_kind} devices"
    try:
        mesh = emulated_mesh(plan.mesh_axes)
    except MeshError as error:
        raise MeshError(
            f"{what}: the plan's mesh has no devices to run on, and so many cannot be"
            " emulated.",
            where="plan.mesh",
            numbers=error.numbers,
            fix="give it devices, as plan.with_mesh(mesh).check(fn, ...), or plan for a"
            " smaller mesh; plan.verify compiles for hardware that is not there.",
        ) from None
    return mesh, f"{mesh.size} emulated cpu devices"


def _check_arrays(call: Call, what: str) -> None:
    for path, x in zip(call.leaves.array_paths, call.leaves.arrays, strict=True):
        if isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer):
            raise TraceError(
                f"{what}: a {type(x).__name__} was given in place of an array.",
                where=path,
                numbers=str(x),
                fix="call it with arrays, outside of jit: it runs the program."
                " plan.verify takes shapes.",
            )


def _whole(x: Any) -> Any:
    """Return an argument with all its shards in this process."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    return x


def _copy(x: Any, where: Any) -> Any:
    """Copy an array to a device or sharding: the program may donate its buffer.

    Python scalars are returned unchanged, since their type is weak.
    """
    if is_python_scalar(x):
        return x
    if jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key):
        x = copied(x)
    elif isinstance(x, jax.Array):
        x = np.asarray(x)  # emulated devices belong to another backend
    return jax.device_put(x, where, may_alias=False)


def _on_one_device(bound: Bound, flat: Any, arrays: Sequence[Any]) -> list[Any]:
    """Run the user's function with `jax.jit` on one device."""
    with _on_first(bound) as device:
        outs = jax.jit(flat)(*(_copy(x, device) for x in arrays))
    return list(jax.block_until_ready(outs))


def _rounded_elsewhere(
    bound: Bound, flat: Any, arrays: Sequence[Any]
) -> list[list[Any]]:
    """Run the function on one device some times, as `with_other_rounding` has it."""
    run = jax.jit(with_other_rounding(flat), compiler_options=_ROUNDING)
    with _on_first(bound) as device:
        placed = [_copy(x, device) for x in arrays]
        return [run(np.uint32(seed), *placed) for seed in range(1, RUNS + 1)]


@contextlib.contextmanager
def _on_first(bound: Bound) -> Iterator[Any]:
    """Enter the contexts of a program on this process's first device, and return it."""
    me = jax.process_index()
    device = next(d for d in bound.mesh.devices.flat if d.process_index == me)
    with (
        _context(bound, device),
        jax.default_device(device),
        fused_attention_traced(),
    ):
        yield device


@contextlib.contextmanager
def _context(bound: Bound, device: Any) -> Iterator[None]:
    """Enter a mesh of one device for programs that name mesh axes, else nothing."""
    if not any(op.name in ASKS_FOR_A_MESH for op in bound.traced.program.ops):
        yield
        return
    names = bound.mesh.axis_names
    one = np.array([device]).reshape((1,) * len(names))
    with jax.set_mesh(Mesh(one, names, axis_types=(AxisType.Auto,) * len(names))):
        yield


def _as_planned(bound: Bound, arrays: Sequence[Any]) -> list[Any]:
    places, arrays = bound.in_shardings, bound.storage.stored(arrays)
    placed = [_copy(x, where) for x, where in zip(arrays, places, strict=True)]
    consts = [
        _copy(_whole(x), sharding)
        for x, sharding in zip(bound.traced.consts, bound.const_shardings, strict=True)
    ]
    with jax.set_mesh(bound.mesh):
        outs = bound.executable.run([*placed, *consts])
    return list(jax.block_until_ready(bound.storage.written(outs)))
