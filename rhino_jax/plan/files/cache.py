"""The plan cache on disk.

A plan is cached under a key (see `cache_key`) that covers everything it depends on.
Files are written atomically, so that any number of processes may write at once; a file
that is damaged, or of another program, is ignored and overwritten. If the directory
cannot be written, or the disk is full, nothing is cached, without an error: the cache
saves time, and affects nothing else.

Environment variables:
  RHINO_CACHE: "0" disables the cache.
  RHINO_CACHE_DIR: the directory; else `$XDG_CACHE_HOME/rhino_jax`, or
    `~/.cache/rhino_jax`, on macOS `~/Library/Caches/rhino_jax`.
  RHINO_CACHE_BYTES: size limit, 268,435,456 (256 MiB) if unset; least recently used
    plans are evicted first.

Equal cache keys mean equal plans. A key covers more than the fingerprint: names that a
plan reports (paths, scopes, labels), inputs of cost estimates (FLOPs, donation, ties),
the whole target, the whole request, and the software that makes the plan: versions, and
rhino's own source, since a checkout changes without its version. Source lines are not
part of it: a cached plan gets those of the program (`rhino_jax.plan.lines`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import jax

from rhino_jax import version
from rhino_jax.errors import PlanFileError, RhinoWarning
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.traits import Traits
from rhino_jax.plan.files.schema import SCHEMA_VERSION, current_versions
from rhino_jax.plan.files.store import plan_from_json, plan_to_json
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.plan import PlanData
from rhino_jax.utils.atomic_write import replace_file


def program_key(program: Program, target: Target) -> str:
    """Return hexadecimal digits that differ whenever the plan of equal requests may
    differ.

    Args:
      program: the program to plan.
      target: the hardware.
    """
    parts = [
        fingerprint(program, ()),
        told_of(program),
        repr(target),
        repr(sorted(made_with().items())),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def cache_key(of_program: str, asked: Sequence[object]) -> str:
    """Return hexadecimal digits that differ whenever the plan may differ.

    Args:
      of_program: the result of `program_key`.
      asked: meshes, pins, budget, level, seed and limits: objects whose `repr` shows
        their content.
    """
    return hashlib.sha256(f"{of_program}\n{tuple(asked)!r}".encode()).hexdigest()


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


MAX_BYTES = 256 << 20
SUFFIX = ".plan"
OLD_S = 3600.0
"""Age in seconds from which a temporary file is left over from a dead process."""

_OFF = ("0", "false", "no", "off")


def cache_dir() -> Path | None:
    """Return the cache directory; None if the cache is disabled."""
    if os.environ.get("RHINO_CACHE", "").strip().lower() in _OFF:
        return None
    given = os.environ.get("RHINO_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if base and Path(base).is_absolute():
            return Path(base) / "rhino_jax"
        of_user = "Library/Caches" if sys.platform == "darwin" else ".cache"
        return Path.home() / of_user / "rhino_jax"
    except RuntimeError:  # the user has no home directory
        return None


def kept(
    key: str,
    make: Callable[[], PlanData],
    *,
    belongs: Callable[[PlanData], bool] = lambda plan: True,
    is_worth_keeping: Callable[[PlanData], bool] = lambda plan: True,
) -> PlanData:
    """Return the plan of a key from the cache, or make and cache it.

    Args:
      key: cache key, hexadecimal digits.
      make: makes the plan.
      belongs: whether a cached plan is the requested one.
      is_worth_keeping: whether a new plan may be cached.
    """
    found = cached_plan(key)
    if found is not None and belongs(found):
        return found
    plan = make()
    if is_worth_keeping(plan):
        store_plan(key, plan)
    return plan


def cached_plan(key: str) -> PlanData | None:
    """Return the plan of a key from the cache; None where there is none."""
    folder = cache_dir()
    return None if folder is None else _read(folder / (key + SUFFIX))


def store_plan(key: str, plan: PlanData) -> None:
    """Cache a plan under a key, unless the cache is disabled."""
    folder = cache_dir()
    if folder is not None:
        _write(folder / (key + SUFFIX), plan)


def _read(path: Path) -> PlanData | None:
    try:
        text = zlib.decompress(path.read_bytes()).decode()
        plan = plan_from_json(text, what=f"`{path}`")
    except (OSError, zlib.error, UnicodeDecodeError, PlanFileError, RecursionError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # marks it as recently used
    return replace(plan, versions={}, cached=str(path))


def _write(path: Path, plan: PlanData) -> None:
    try:
        content = zlib.compress(plan_to_json(plan).encode(), 1)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, content, 0o600)
        _prune(path.parent, keep=path)
    except OSError as error:
        # The usual folder is no setting: a home that is read-only is nobody's mistake.
        if os.environ.get("RHINO_CACHE_DIR"):
            _warn(f"plans cannot be kept in {path.parent}: {error.strerror or error}")
    except (TypeError, ValueError, RecursionError):
        return  # A plan that cannot be serialized.


def _prune(folder: Path, keep: Path) -> None:
    """Delete least recently used plans beyond the limit, and stale temporary files."""
    now, plans = time.time(), []
    for entry in os.scandir(folder):
        # Another process may delete it meanwhile.
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if entry.name.endswith(SUFFIX):
                plans.append((status.st_mtime, status.st_size, entry.path))
            elif entry.name.endswith(".tmp") and now - status.st_mtime > OLD_S:
                os.unlink(entry.path)
    excess = sum(size for _, size, _ in plans) - _most_bytes()
    for _, size, name in sorted(plans):
        if excess <= 0:
            break
        if name != str(keep):
            with contextlib.suppress(OSError):
                os.unlink(name)
            excess -= size


def _most_bytes() -> int:
    given = os.environ.get("RHINO_CACHE_BYTES", str(MAX_BYTES))
    try:
        return int(given)
    except ValueError:
        _warn(f"RHINO_CACHE_BYTES={given!r} is no number; the limit is {MAX_BYTES:,}")
        return MAX_BYTES


@functools.cache
def _warn(text: str) -> None:
    """Warn of a setting of the cache that cannot be used, once in a process."""
    warnings.warn(
        f"{text}. RHINO_CACHE_DIR and RHINO_CACHE_BYTES say where and how many plans"
        " are kept, RHINO_CACHE=0 that none are.",
        RhinoWarning,
        stacklevel=2,
    )
