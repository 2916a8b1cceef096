"""Dependencies of a result: versions, and the planner's own source."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import rhino_jax
from rhino_jax.hardware.files import configs_dir


PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "ortools")
"""Packages whose version changes plans or compiled programs."""

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables that change the compiled program."""

_TELLS_ONLY = (
    "__main__.py",
    "cli.py",
    "commands/",
    "explain/",
    "verify/results/",
    "bench/command.py",
    "bench/progress.py",
    "bench/tables/",
)
"""Files that only report on plans, and change no result."""

_COMPILES = ("hardware/compile_only.py", "verify/compile.py")
"""Files that define how a program is compiled."""


@cache
def versions() -> dict[str, str]:
    """Return versions by name; packages that are not installed are left out.

    "source" is a digest of the planner's source, the hardware files and the models', so
    that results of an edited checkout are not mistaken for those of another.
    """
    found = {"rhino_jax": rhino_jax.__version__, "source": source_digest()}
    found["python"] = platform.python_version()
    return found | _packages()


@cache
def compiler_versions() -> dict[str, str]:
    """Return what a compiled program depends on, next to the program itself.

    "source" is a digest of the files that define how to compile, without the planner.
    """
    sources = [_root() / name for name in _COMPILES]
    sources += (_root() / "_compat").glob("*.py")
    sources += (configs_dir() / "xla_gpu").iterdir()
    return {"source": _digest(sources), **_packages()}


def _packages() -> dict[str, str]:
    """Return versions of packages, and the compiler flags of the user's environment."""
    found = {name: flags for name in FLAGS if (flags := _flags(name))}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _flags(name: str) -> str:
    flags = os.environ.get(name, "").split()
    return " ".join(f for f in flags if "host_platform_device_count" not in f)


def source_digest() -> str:
    """Return eight hex digits that identify the source of planning and measuring."""
    sources = [
        path
        for path in _root().rglob("*.py")
        if not path.relative_to(_root()).as_posix().startswith(_TELLS_ONLY)
    ]
    sources += [
        path
        for folder in ("hardware", "holdout", "models", "xla_gpu")
        for path in (configs_dir() / folder).iterdir()
    ]
    return _digest(sources)


def _root() -> Path:
    return Path(rhino_jax.__file__).resolve().parent


def _digest(sources: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    named = {_name(path): path for path in sources}
    for name in sorted(named):
        digest.update(name.encode() + named[name].read_bytes())
    return digest.hexdigest()[:8]


def _name(path: Path) -> str:
    """Return the name of a source, the same for a wheel, with configs/ inside the
    package, as for a checkout."""
    if path.suffix == ".py" and path.is_relative_to(_root()):
        return path.relative_to(_root()).as_posix()
    return f"{path.parent.name}/{path.name}"


def versions_line(found: Mapping[str, str]) -> str:
    """Return versions as `rhino_jax 0.1.0, Python 3.11.7, jax 0.10.2, …`."""
    named = {k: v for k, v in found.items() if k != "source"}
    return ", ".join(f"{k.replace('python', 'Python')} {v}" for k, v in named.items())
