"""The only file that touches JAX's private modules or spans its versions.

Supported: jax 0.10.2 (Python 3.11) to 0.12 (Python 3.12). Each function says
what differs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import (
    api_util,
    config,
    core as jax_core,
    distributed,
    hardware_utils,
    linear_util,
    mesh as mesh_lib,
    sharding_impls,
    source_info_util,
)
from jax._src.interpreters import partial_eval
from jax._src.state import discharge, types as state_types
from jax.extend import core as jex_core
from jaxlib import xla_client


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without its constants' values.

    On 0.10 a ClosedJaxpr wraps a Jaxpr; on 0.12 they are one class.
    """
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_consts(jaxpr: Any) -> tuple[Any, ...]:
    """Values of `constvars`; on 0.10 only a ClosedJaxpr has them."""
    return tuple(getattr(jaxpr, "consts", ()))


def is_jaxpr(x: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, closed (0.10) or not."""
    return isinstance(x, (jex_core.Jaxpr, jex_core.ClosedJaxpr))


def is_literal(atom: Any) -> bool:
    """Whether an operand is a constant in the text; same on both versions."""
    return isinstance(atom, jex_core.Literal)


def new_primitive(name: str) -> Any:
    """A primitive of our own; same on both versions."""
    return jex_core.Primitive(name)


def hide_frames(file: str) -> None:
    """Let equations point at what called the functions of this file. Same on both."""
    source_info_util.register_exclusion(file)


def is_drop_var(var: Any) -> bool:
    """Whether a result is never used; same on both versions."""
    return isinstance(var, jex_core.DropVar)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of consts and carries of a `scan`.

    On 0.10 two parameters; on 0.12 a flat tree of (consts, carries, stacked inputs).
    """
    if "num_carry" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    consts, carries, _ = params["ft_in"].unpack()
    return len(consts), len(carries)


def user_frames(source_info: Any) -> Iterator[tuple[str, int, str]]:
    """(file, line, function) of the frames outside JAX, innermost first.

    Same on both versions.
    """
    for frame in source_info_util.user_frames(source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def close_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """A jaxpr with its constants: ClosedJaxpr on 0.10, Jaxpr on 0.12."""
    return jex_core.ClosedJaxpr(jaxpr, list(consts))


def retrace(
    fn: Callable[..., Any],
    jaxpr: Any,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> tuple[Any, list[Any]]:
    """Trace `fn` on the very types of `jaxpr`'s inputs, references included.

    `jax.make_jaxpr` takes arrays only and would lose the debug names. Same on
    both versions.

    Args:
      fn: the function.
      jaxpr: whose inputs it takes.
      shapes: of the inputs, where they are other ones.
    Returns:
      The jaxpr without its constants, and the constants.
    """
    wrapped = linear_util.wrap_init(fn, debug_info=jaxpr.debug_info)
    avals = [v.aval for v in jaxpr.invars]
    if shapes is not None:
        avals = [
            aval
            if getattr(aval, "shape", ()) == shape
            else jax.core.ShapedArray(shape, aval.dtype, weak_type=aval.weak_type)
            for aval, shape in zip(avals, shapes, strict=True)
        ]
    new, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, avals)
    return new, list(consts)


@contextlib.contextmanager
def eqn_context(eqn: Any) -> Iterator[None]:
    """Bind within the name stack, source line and settings of an equation.

    As `jax.core.eval_jaxpr` does. Same on both versions.
    """
    info = eqn.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    with (
        source_info_util.user_context(info.traceback, name_stack=names),
        eqn.ctx.manager,
    ):
        yield


def in_current_mesh(jaxpr: Any) -> Any:
    """A jaxpr, and those inside it, as if traced in the mesh context of this moment.

    Equations remember the mesh in whose context they were traced, and are refused on
    values of `shard_map`, whose mesh has Manual axes. Same on both versions.
    """
    mesh = mesh_lib.get_abstract_mesh()

    def renewed(value: Any) -> Any:
        if is_jaxpr(value):
            opened = open_jaxpr(value)
            return with_eqns(value, [*map(moved, opened.eqns)], opened.outvars)
        if isinstance(value, tuple | list) and any(map(is_jaxpr, value)):
            return type(value)(map(renewed, value))
        if isinstance(value, jax.sharding.NamedSharding) and not any(value.spec):
            return jax.sharding.NamedSharding(mesh, value.spec)
        return value

    def moved(eqn: Any) -> Any:
        with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
            context = type(eqn.ctx)()
        params = {key: renewed(value) for key, value in eqn.params.items()}
        return eqn.replace(ctx=context, params=params)

    return renewed(jaxpr)


def bind_eqn(eqn: Any, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Run an equation's primitive with these parameters; a list of results.

    `get_bind_params` gives a dict from 0.10.2 on, a pair (subfuns, params) before.
    """
    bound = eqn.primitive.get_bind_params(dict(params))
    if isinstance(bound, tuple):
        subfuns, bound = bound
        out = eqn.primitive.bind(*subfuns, *args, **bound)
    else:
        out = eqn.primitive.bind(*args, **bound)
    return list(out) if eqn.primitive.multiple_results else [out]


def name_as(
    flat: Callable[..., Any], fn: Callable[..., Any], name: str, paths: Sequence[str]
) -> None:
    """Let errors that are raised while `flat` is traced name another function.

    They then say what they say of `jax.jit(fn)`: its name, file and line, and the
    argument on which a value depends. Same on both versions.

    Args:
      flat: a function of arrays.
      fn: the user's function.
      name: its name.
      paths: tree paths of the arrays.
    """
    flat.__name__ = flat.__qualname__ = name
    info = jax_core.DebugInfo(
        "jit",
        api_util.fun_sourceinfo(fn),
        tuple(paths),
        jax_core.initial_result_paths,
    )
    api_util.save_wrapped_fun_debug_info(flat, info)


JITTED = type(jax.jit(lambda: None))
"""The class of what `jax.jit` makes."""


def jit_options(fn: Any) -> dict[str, tuple[Any, ...]]:
    """The static and donated arguments that a `jax.jit` object was made with.

    Empty where `fn` is no such object: its type tells, since `functools.wraps` copies
    its attributes to any wrapper. Same on both versions.
    """
    if not isinstance(fn, JITTED):
        return {}
    info: Any = fn._jit_info  # type: ignore[attr-defined]
    keys = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    return {key: tuple(getattr(info, key)) for key in keys}


def jit_shardings(fn: Any) -> tuple[Any, ...]:
    """The `in_shardings` and `out_shardings` of a `jax.jit` object, as flat leaves.

    Those that say something; empty where `fn` is no such object. Same on both
    versions.
    """
    if not isinstance(fn, JITTED):
        return ()
    info: Any = fn._jit_info  # type: ignore[attr-defined]
    leaves = (getattr(info, f"{x}_shardings_leaves", ()) for x in ("in", "out"))
    unsaid = type(sharding_impls.UNSPECIFIED)  # type: ignore[attr-defined]
    return tuple(
        s
        for side in leaves
        for s in side
        if not isinstance(s, unsaid) and s is not None
    )


def is_outermost() -> bool:
    """Whether nothing is being traced. Same on both versions."""
    return bool(jax_core.trace_state_clean())


def context_mesh() -> Any | None:
    """The mesh of `jax.set_mesh` or of `with mesh:`, concrete where it is.

    `jax.sharding.get_mesh` raises inside of `jit`. Same on both versions.
    """
    concrete = mesh_lib.get_concrete_mesh()
    if concrete is not None and not concrete.empty:
        return concrete
    abstract = mesh_lib.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    physical = mesh_lib.thread_resources.env.physical_mesh
    return None if physical.empty else physical


def is_compile_only(device: Any) -> bool:
    """Whether a device can be compiled for but not run on (a topology's device).

    Same on both versions.
    """
    client = getattr(device, "client", None)
    return "compile_only" in str(getattr(client, "runtime_type", ""))


def like_jaxpr(old: Any, new: Any, consts: Sequence[Any]) -> Any:
    """`new` with its constants, closed where `old` is closed.

    On 0.10 `remat` holds a Jaxpr that takes no constants, other calls a ClosedJaxpr.
    """
    if hasattr(old, "consts"):
        return close_jaxpr(new, consts)
    assert not consts, "a jaxpr without constants gained some"
    return new


def with_eqns(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """A jaxpr of the same inputs with other equations, closed where it is closed."""
    changes = {"eqns": list(eqns), "outvars": list(outvars)}
    inner = getattr(jaxpr, "jaxpr", None)  # on 0.12 itself
    if inner is None or inner is jaxpr:
        return jaxpr.replace(**changes)
    return jaxpr.replace(jaxpr=inner.replace(**changes))


def low_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr without high-level primitives, of the same arguments and results.

    0.12 traces some functions (`jnp.searchsorted`, `jnp.interp`) to primitives
    that are expanded only before lowering; 0.10 has none.
    """
    if not getattr(jaxpr, "is_high", False):
        return jaxpr
    return partial_eval.lower_jaxpr2(jaxpr)


def without_dead_code(jaxpr: Any) -> Any:
    """A jaxpr of the same arguments and results without equations, those inside it
    too, that no result and no effect needs. Same on both versions."""
    opened = open_jaxpr(jaxpr)
    live, _ = partial_eval.dce_jaxpr(
        opened, [True] * len(opened.outvars), instantiate=True
    )
    return with_eqns(jaxpr, live.eqns, live.outvars)


def coordination_client() -> Any | None:
    """The client of JAX's coordination service; None without `jax.distributed`.

    Has `key_value_set_bytes`, `blocking_key_value_get_bytes`, `key_value_try_get` and
    `key_value_delete`. Same on both versions.
    """
    return distributed.global_state.client


def ref_value(ref: Any) -> Any:
    """What a reference holds: the array itself, not a copy. Same on both versions."""
    if isinstance(ref, jax.core.Tracer):
        return ref[...]
    return ref._refs._buf


def set_ref_value(ref: Any, value: Any) -> None:
    """Let a reference hold this very array, wherever that lies.

    Assigning to it would copy, and needs both on the same devices. Same on both.
    """
    if isinstance(ref, jax.core.Tracer):
        ref[...] = value
        return
    held, inner = ref._refs, jax.typeof(value)
    held._buf = value
    if held._aval.inner_aval != inner:  # it says on which mesh, where that is Explicit
        ref._aval = held._aval = held._aval.update(inner_aval=inner)


def without_refs(jaxpr: Any) -> Any:
    """The same program without references that it makes itself.

    What these hold becomes plain values, carried through loops. Same on both versions.
    """
    effects = open_jaxpr(jaxpr).effects
    if not any(isinstance(e, jax_core.InternalMutableArrayEffect) for e in effects):
        return jaxpr
    return discharge.discharge_state(jaxpr)


def references_as_arguments(jaxpr: Any) -> tuple[Any, list[Any], list[bool]]:
    """A closed jaxpr whose captured references are its last arguments.

    Same on both versions.

    Returns:
      The jaxpr; the references; whether it writes to each.
    """
    opened, consts = open_jaxpr(jaxpr), jaxpr_consts(jaxpr)
    is_ref = [isinstance(c, jax.Ref) for c in consts]
    moved = [v for v, found in zip(opened.constvars, is_ref, strict=True) if found]
    if not moved:
        return jaxpr, [], []
    written = {
        e.input
        for e in opened.effects
        if isinstance(e, state_types.WriteEffect | state_types.AccumEffect)
    }
    found = _with_inputs(
        jaxpr,
        [*opened.invars, *moved],
        [v for v, found in zip(opened.constvars, is_ref, strict=True) if not found],
        [c for c, found in zip(consts, is_ref, strict=True) if not found],
    )
    references = [c for c, found in zip(consts, is_ref, strict=True) if found]
    return found, references, [v in written for v in moved]


def discharged(jaxpr: Any) -> Any:
    """A closed jaxpr on what its arguments that are references hold.

    Gives, after its own results, what each holds in the end. Same on both versions.
    """
    return discharge.discharge_state(jaxpr)


def last_as_consts(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """A closed jaxpr whose last arguments are captured instead: these, as they are.

    Same on both versions.
    """
    opened = open_jaxpr(jaxpr)
    first = len(opened.invars) - len(consts)
    return _with_inputs(
        jaxpr,
        opened.invars[:first],
        [*opened.constvars, *opened.invars[first:]],
        [*jaxpr_consts(jaxpr), *consts],
    )


def _with_inputs(
    jaxpr: Any, invars: Sequence[Any], constvars: Sequence[Any], consts: Sequence[Any]
) -> Any:
    opened = open_jaxpr(jaxpr)
    changes: dict[str, Any] = {
        "invars": list(invars),
        "constvars": list(constvars),
        "debug_info": opened.debug_info.with_unknown_names(),
    }
    if opened is jaxpr:  # 0.12
        return jaxpr.replace(**changes, consts=list(consts))
    return close_jaxpr(opened.replace(**changes), consts)


def num_tpu_chips() -> int:
    """Number of TPU chips in this machine. Same on both versions."""
    count, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return int(count)


def make_cpu_devices(count: int) -> list[Any]:
    """Emulated CPU devices of a client of their own, beside JAX's. Same on both."""
    client: Any = xla_client.make_cpu_client(num_devices=count)
    return list(client.devices())


_COMPILATIONS = itertools.count(1_000_000)


@contextlib.contextmanager
def compiling_anew() -> Iterator[dict[str, str | bool]]:
    """Let no compiled program come from a cache, or go to the persistent one.

    Gives an option to compile with that is a part of every cache's key and changes
    no program: how many buffers XLA's debug output would show, of which there is
    none. Same on both versions.
    """
    with config.persistent_cache_min_compile_time_secs(math.inf):
        yield {"xla_debug_buffer_assignment_show_max": str(next(_COMPILATIONS))}


def only_nccl() -> dict[str, str]:
    """Options that leave collectives on GPU to NCCL.

    On 0.12 XLA writes kernels of its own for small all-reduces, and dies of an LLVM
    error over some whose result is a scalar ("size mismatch when packing elements for
    LLVM struct"); 0.10 does not know the option.
    """
    if jax.__version_info__ < (0, 12):
        return {}
    return {"xla_gpu_experimental_use_collective_kernels": ""}
