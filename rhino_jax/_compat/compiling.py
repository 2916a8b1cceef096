"""Compile in one process what another process would pass to XLA; read the options of a
`jax.jit` object, and the context of a call."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax._src import (
    compiler,
    core as jax_core,
    mesh as mesh_lib,
    sharding_impls,
)
from jax._src.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir


class _CompileIntercepted(BaseException):
    """Aborts a compilation where XLA would begin; no handler of JAX's catches it."""


_LOCK = threading.Lock()


def compiler_input(
    lowered: jax.stages.Lowered, options: Mapping[str, Any]
) -> tuple[bytes, bytes] | None:
    """Return what XLA would be given: the module as bytecode, and serialized options.

    None for a program with host callbacks, which are functions of this process. Same on
    both versions.

    Args:
      lowered: the lowered program.
      options: options as for `Lowered.compile`; one of them must be new, or a program
        that was compiled before comes out of JAX's cache.
    """
    real, thread = compiler.backend_compile_and_load, threading.get_ident()

    def take(
        backend: Any, module: Any, devices: Any, given: Any, callbacks: Any
    ) -> Any:
        if threading.get_ident() != thread:
            return real(backend, module, devices, given, callbacks)
        if callbacks:
            raise _CompileIntercepted(None)
        raise _CompileIntercepted(
            (mlir.module_to_bytecode(module), given.SerializeAsString())
        )

    with _LOCK:
        compiler.backend_compile_and_load = take
        try:
            lowered.compile(compiler_options=dict(options))
        except _CompileIntercepted as taken:
            return taken.args[0]
        finally:
            compiler.backend_compile_and_load = real
    raise RuntimeError("the program came out of a cache")


class CompiledInput:
    """A program compiled from the results of `compiler_input`.

    Args:
      module, options: results of `compiler_input`.
      devices: devices of the mesh, in its order; they may be compile-only.
      more: further XLA options.
    """

    def __init__(
        self,
        module: bytes,
        options: bytes,
        devices: Sequence[Any],
        more: Mapping[str, Any],
    ) -> None:
        parsed: Any = xla_client.CompileOptions.ParseFromString(options)
        parsed.env_option_overrides = [*parsed.env_option_overrides, *more.items()]
        with mlir.make_ir_context():
            self._executable: Any = compiler.backend_compile_and_load(
                devices[0].client,
                ir.Module.parse(module),
                xla_client.DeviceList(tuple(devices)),
                parsed,
                [],
            )

    def as_text(self) -> str:
        """Return the optimized program, as `jax.stages.Compiled.as_text` does."""
        return "\n\n".join(m.to_string() for m in self._executable.hlo_modules())

    def memory_analysis(self) -> Any:
        """Return XLA's `CompiledMemoryStats`."""
        return self._executable.get_compiled_memory_stats()


JITTED = type(jax.jit(lambda: None))
"""The class of `jax.jit` objects."""


def jit_options(fn: Any) -> dict[str, tuple[Any, ...]]:
    """Return the static and donated arguments of a `jax.jit` object.

    Empty where `fn` is no such object. It is recognised by its type, since
    `functools.wraps` copies its attributes to any wrapper. Same on both versions.
    """
    if not isinstance(fn, JITTED):
        return {}
    info: Any = fn._jit_info  # type: ignore[attr-defined]
    keys = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    return {key: tuple(getattr(info, key)) for key in keys}


def jit_shardings(fn: Any) -> tuple[Any, ...]:
    """Return the `in_shardings` and `out_shardings` of a `jax.jit` object, flat.

    Without unspecified ones; empty where `fn` is no such object. Same on both versions.
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
    """Return the mesh of `jax.set_mesh` or `with mesh:`, or None.

    Concrete where it is. `jax.sharding.get_mesh` raises inside of `jit`. Same on both
    versions.
    """
    concrete = mesh_lib.get_concrete_mesh()
    if concrete is not None and not concrete.empty:
        return concrete
    abstract = mesh_lib.get_abstract_mesh()
    if not abstract.empty:
        return abstract
    physical = mesh_lib.thread_resources.env.physical_mesh
    return None if physical.empty else physical
