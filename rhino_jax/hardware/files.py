"""Load targets by name, from a file, or from the devices that are present."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rhino_jax._compat import is_compile_only
from rhino_jax.errors import HardwareError, MeshError, nearest
from rhino_jax.hardware.schema import parse_target
from rhino_jax.hardware.target import Target
from rhino_jax.hardware.topology import with_topology
from rhino_jax.utils.keywords import brief


_SUFFIX = re.compile(r"(?P<name>.+):(?P<dims>\d+(x\d+)*)")
# Accelerator types of Google Cloud (cloud.google.com/tpu/docs/v5p, v5e and v6e), whose
# suffix counts TensorCores → (name of the hardware file, TensorCores per chip).
_ACCELERATOR_TYPES = {
    "v4": ("v4", 2),
    "v5litepod": ("v5e", 1),
    "v5p": ("v5p", 2),
    "v6e": ("v6e", 1),
}


def configs_dir() -> Path:
    """Return the folder with `hardware/` and `models/`.

    An installed package contains it; a source checkout has it next to the package.

    Raises:
      HardwareError: it is in neither place.
    """
    package = Path(__file__).resolve().parent.parent
    places = (package / "configs", package.parent / "configs")
    for place in places:
        if (place / "hardware").is_dir():
            return place
    raise HardwareError(
        "rhino_jax's configuration files are not where they should be.",
        where=" and ".join(map(str, places)),
        fix="install rhino_jax again.",
    )


def hardware_names() -> tuple[str, ...]:
    """Return the names that `load_target` accepts, sorted."""
    return tuple(sorted(p.stem for p in (configs_dir() / "hardware").glob("*.toml")))


def load_target(hardware: str | Path | Target) -> Target:
    """Return the target of a name, or the one that a file describes.

    Args:
      hardware: a name as "v5e" or "h100"; the path of a TOML file (see
        `rhino_jax.hardware.schema`); or a target, which is returned as it is. A
        name or path may end in its topology: "v5p:4x4x4" (the torus, in chips),
        "v5e:2x16x16" (two slices), "h100:8x8" (hosts x GPUs of one NVLink domain),
        "cpu:8" (devices). Accelerator types of Google Cloud are accepted too:
        "v5litepod-8" is "v5e:8", eight chips in the usual torus.
    Raises:
      HardwareError: the name is unknown, the topology does not fit, or the file
        cannot be read or is malformed.
    """
    if isinstance(hardware, Target):
        return hardware
    if not isinstance(hardware, str | Path):
        raise HardwareError(
            "this is no hardware.",
            where="hardware=",
            numbers=f"got {brief(hardware)} ({type(hardware).__name__})",
            fix=f"write one of {', '.join(hardware_names())}, as 'v5e:4x4', the path of"
            " a TOML file, or a rhino.Target.",
        )
    text = str(hardware).strip()
    text = _of_accelerator_type(text) or text
    match = _SUFFIX.fullmatch(text)
    name, dims = (match["name"], match["dims"]) if match else (text, None)
    path = Path(name).expanduser()
    is_path = isinstance(hardware, Path) or path.suffix == ".toml" or "/" in name
    if not is_path:
        path = _named(name)
    target = _read(path)
    if dims is None:
        return target
    return with_topology(target, tuple(int(d) for d in dims.split("x")), text)


def _of_accelerator_type(text: str) -> str | None:
    """Return `name:chips` of an accelerator type of Google Cloud; None for others."""
    name, _, count = text.lower().rpartition("-")
    if name not in _ACCELERATOR_TYPES or not count.isdecimal():
        return None
    known, cores = _ACCELERATOR_TYPES[name]
    if int(count) % cores:
        return None
    return f"{known}:{int(count) // cores}"


def _named(name: str) -> Path:
    names = hardware_names()
    if name.lower() not in names:
        topology = " A topology is written v5p:4x4x4." if ":" in name else ""
        raise HardwareError(
            f"hardware {name!r} is not known.{nearest(name.lower(), names)}{topology}",
            where="hardware=",
            numbers=f"known: {', '.join(names)}",
            fix="use one of these, the path of a TOML file, or a rhino.Target.",
        )
    return configs_dir() / "hardware" / f"{name.lower()}.toml"


def _read(path: Path) -> Target:
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(
            "hardware file: this is not TOML.",
            where=str(path),
            numbers=str(error),
            fix="correct that line.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(
            "hardware file: it cannot be read.",
            where=str(path),
            numbers=getattr(error, "strerror", None) or "it is not UTF-8 text",
            fix=f"give a readable TOML file, or one of {', '.join(hardware_names())}.",
        ) from None
    return parse_target(entries, file=str(path), name=path.stem)


def detect_target(devices: Sequence[Any]) -> Target:
    """Return the target that JAX devices belong to.

    On TPU the torus is read from the devices' coordinates; for compile-only GPUs, the
    hosts from the process indices. The memory size is that of the hardware file, not
    what this process has available, so that all processes compute the same plan.

    Args:
      devices: `jax.Device`s, compile-only ones included.
    Raises:
      MeshError: there are no devices.
      HardwareError: they are of several kinds, or of a kind that no file describes.
    """
    if not devices:
        raise MeshError(
            "there are no devices to plan for.",
            fix="pass a mesh with devices, or name the hardware: hardware='v5e'.",
        )
    kinds = sorted({str(d.device_kind) for d in devices})
    if len(kinds) > 1:
        raise HardwareError(
            "the devices are of several kinds.",
            where="hardware=",
            numbers=", ".join(kinds),
            fix="use devices of one kind, or give hardware=… for what they share.",
        )
    known: dict[str, str] = {}
    for name in hardware_names():
        target = load_target(name)
        if kinds[0] in target.device.kinds:
            return _with_coordinates(target, devices)
        known |= dict.fromkeys(target.device.kinds, name)
    close = nearest(kinds[0], known)
    raise HardwareError(
        f"no hardware file describes devices of kind {kinds[0]!r}.{close}",
        where="hardware=",
        numbers="known: " + ", ".join(f"{k!r} ({n})" for k, n in known.items()),
        fix="give the closest one, as hardware='h100', or a TOML file.",
    )


def _with_coordinates(target: Target, devices: Sequence[Any]) -> Target:
    """Return the target with the torus that the devices' coordinates span, if any."""
    torus = target.torus
    if torus is None:
        return _with_hosts(target, devices)
    if any(getattr(d, "coords", None) is None for d in devices):
        return target
    chips = {(getattr(d, "slice_index", 0), *d.coords) for d in devices}
    slices, *spans = (len(set(along)) for along in zip(*chips, strict=True))
    dims, others = tuple(spans[: torus.rank]), spans[torus.rank :]
    if len(chips) != slices * math.prod(dims) or any(span > 1 for span in others):
        return target
    named = (slices, *dims) if slices > 1 else dims
    # The devices may be any part of a slice.
    text = f"{target.name}:{'x'.join(map(str, named))}"
    return with_topology(target, named, text, is_built=False)


def _with_hosts(target: Target, devices: Sequence[Any]) -> Target:
    """Return the target with the hosts of compile-only GPUs.

    Real GPUs report only their process, which may own just a part of a host.
    """
    if len(target.tiers) != 2 or not all(map(is_compile_only, devices)):
        return target
    hosts = Counter(d.process_index for d in devices)
    sizes = set(hosts.values())
    if len(sizes) > 1:
        return target
    named = (len(hosts), sizes.pop())
    # The devices may be any part of the hosts.
    text = f"{target.name}:{'x'.join(map(str, named))}"
    return with_topology(target, named, text, is_built=False)
