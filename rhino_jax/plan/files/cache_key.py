"""The cache key of a plan: equal keys, equal plans.

It covers more than the fingerprint: names that a plan reports (paths, scopes, labels),
inputs of cost estimates (FLOPs, donation, ties), the whole target, the whole request,
and the software that makes the plan: versions, and rhino's own source, since a checkout
changes without its version. Source lines are not part of it: a cached plan gets those
of the program (`rhino_jax.plan.lines`).
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax

from rhino_jax import version
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.traits import Traits
from rhino_jax.plan.files.schema import SCHEMA_VERSION, current_versions
from rhino_jax.plan.fingerprint import fingerprint


def cache_key(program: Program, target: Target, asked: Sequence[object]) -> str:
    """Return hexadecimal digits that differ whenever the plan may differ.

    Args:
      program: the program to plan.
      target: the hardware.
      asked: meshes, pins, budget, level, seed and limits: objects whose `repr` shows
        their content.
    """
    parts = [
        fingerprint(program, ()),
        told_of(program),
        repr(target),
        repr(tuple(asked)),
        repr(sorted(made_with().items())),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def told_of(program: Program) -> str:
    """Return a hash of what a plan reports or estimates beyond the fingerprint."""
    lines = [program.name]
    lines += [
        f"{op.flops!r} {op.is_fusible} {op.is_known} {op.label} {op.source.name_stack}"
        f" {_traits_line(op.traits)}"
        for op in program.ops
    ]
    by_hand = [op.manual for op in program.ops if op.manual is not None]
    lines += [
        repr((c.kind, c.axes, c.local_bytes, c.runs))
        for manual in by_hand
        for c in manual.collectives
    ]
    lines += [str(manual.is_all_priced) for manual in by_hand]
    calls = [op.call for op in program.ops if op.call is not None]
    lines += [
        f"{call.trip_count} {call.is_trip_count_known} {call.is_apart}"
        f" {call.is_program}"
        for call in calls
    ]
    lines.append(repr(program.transforms))
    lines += [repr(e) for e in (*program.inputs, *program.outputs)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def _traits_line(traits: Traits) -> str:
    return repr(traits)


@functools.cache
def made_with() -> dict[str, str]:
    """Return the versions of all that makes plans, with rhino's source hash."""
    found = {
        **current_versions(),
        "schema": str(SCHEMA_VERSION),
        "source": source_hash(),
        "platform": jax.default_backend(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }
    for name in ("jaxlib", "ortools", "numpy", "libtpu", "jax-cuda12-plugin"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


@functools.cache
def source_hash() -> str:
    """Return a hash of all of rhino's modules: 10 ms for 250 files."""
    folder = Path(version.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
