"""Compile-only devices: devices that XLA can compile for, but that cannot run programs.

XLA's TPU and GPU compilers need neither a TPU nor a GPU: libtpu and the CUDA plugin
describe any of their devices on request. This works in a process whose CPU backend is
already running. Environment variables that the compilers need while they are loaded are
set for that moment only, and never override the user's values.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from rhino_jax._compat import is_compile_only, num_tpu_chips, only_nccl
from rhino_jax.errors import HardwareError
from rhino_jax.utils.stderr import captured_stderr


# Without TPUs: ask no metadata server, wait for no other host, share the library
# with other processes.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The plugin would refuse to register where CUDA's libraries are not installed.
_GPU_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_GPU_PLUGIN = "jax_plugins.xla_cuda13"
_CUDA = "nvidia.cu13"
# Where XLA looks by default: a CUDA installed on the system.
_SYSTEM_CUDA = ("/usr/local/cuda", "/opt/cuda")
_CUDA_FILES = ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc")


class DeviceCall(NamedTuple):
    """The call that makes compile-only devices, so that another process can repeat it.

    Attributes:
      kind: "tpu" or "gpu".
      args: arguments of `tpu_devices` or `gpu_devices`.
    """

    kind: str
    args: tuple[Any, ...]

    def devices(self) -> tuple[Any, ...]:
        """Return the devices."""
        make = tpu_devices if self.kind == "tpu" else gpu_devices
        return make(*self.args)


_ORIGINS: dict[int, DeviceCall] = {}
"""`id` of a device → the call that made it. Devices are never freed."""


def origin_of(mesh: Mesh) -> DeviceCall | None:
    """Return the call that made a mesh's devices; None if not from this module."""
    return _ORIGINS.get(id(mesh.devices.flat[0]))


def _kept(devices: tuple[Any, ...], origin: DeviceCall) -> tuple[Any, ...]:
    _ORIGINS.update((id(device), origin) for device in devices)
    return devices


@functools.cache
def tpu_devices(topology: str, slices: int = 1) -> tuple[Any, ...]:
    """Return compile-only devices of TPU slices, the same objects for equal arguments.

    Args:
      topology: a topology name of libtpu, as "v5e:4x4".
      slices: number of such slices.
    Raises:
      HardwareError: libtpu is not installed, or knows no such topology.
    """
    from jax.experimental import topologies

    library = os.environ.get("TPU_LIBRARY_PATH", "")
    if _find_spec("libtpu") is None and not os.path.isfile(library):
        raise _missing("TPUs", "libtpu is not installed", "tpu")
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if topology.startswith("v4:"):
        # As on real v4: the two cores of a chip are one device.
        options["chip_config_name"] = "megacore"
    settings = {} if num_tpu_chips() else _TPU_ENVIRONMENT
    with environment(settings), captured_stderr():
        try:
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=topology, **options
            )
            return _kept(tuple(found.devices), DeviceCall("tpu", (topology, slices)))
        except RuntimeError as error:
            if "INVALID_ARGUMENT" not in str(error):
                raise
            raise HardwareError(
                f"hardware {topology!r}: libtpu knows no such topology.",
                where="hardware=",
                numbers=str(error).strip().partition("\n")[0],
                fix="of a slice's first two sides, each must be even or 1; as v5e:4x4"
                " or v5p:2x2x4.",
            ) from None


class TpuLog:
    """The messages that libtpu writes to this process's log from now on.

    libtpu's warnings go to that log, not to standard error as those of XLA's other
    compilers; among them are the involuntary full rematerialisations.
    """

    def __init__(self) -> None:
        self._file = self._newest()
        self._start = self._file.stat().st_size if self._file else 0

    def _newest(self) -> Path | None:
        folder = Path(os.environ.get("TPU_LOG_DIR", "/tmp/tpu_logs"))
        files = folder.glob(f"tpu_driver.*.WARNING.*.{os.getpid()}")
        return max(files, default=None)

    def read(self) -> str:
        """Return all text logged since construction; empty if libtpu keeps no log."""
        file = self._newest()
        if file is None:
            return ""
        with file.open(errors="replace") as text:
            text.seek(self._start if file == self._file else 0)
            return text.read()


@functools.cache
def gpu_devices(description: Path, hosts: int, gpus_per_host: int) -> tuple[Any, ...]:
    """Return compile-only devices of GPU hosts, the same objects for equal arguments.

    Args:
      description: file with a `GpuTargetConfigProto` in text form; see
        `configs/xla_gpu`.
      hosts: number of hosts.
      gpus_per_host: number of GPUs of a host, joined by NVLink.
    Raises:
      HardwareError: the CUDA plugin or its tools are not installed.
    """
    from jax.experimental import topologies

    cuda_dir()

    def describe() -> tuple[Any, ...]:
        return tuple(
            topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                topology=f"1x{hosts}x{gpus_per_host}",
                target_config=description.read_text(encoding="utf-8"),
            ).devices
        )

    origin = DeviceCall("gpu", (description, hosts, gpus_per_host))
    with environment(_GPU_ENVIRONMENT), captured_stderr():
        try:
            return _kept(describe(), origin)
        except NotImplementedError:
            # JAX looks for plugins once, when it starts; this one was installed later,
            # or was refused because CUDA's libraries are missing.
            importlib.import_module(_GPU_PLUGIN).initialize()
            return _kept(describe(), origin)


def cuda_dir() -> Path:
    """Return the folder with `ptxas` and `libdevice`, which XLA:GPU compiles with.

    Raises:
      HardwareError: these files, or the CUDA plugin, are not installed.
    """
    if _find_spec(_GPU_PLUGIN) is None:
        raise _missing("GPUs", f"{_GPU_PLUGIN} is not installed", "gpu")
    spec = _find_spec(_CUDA)
    wheels = (spec and spec.submodule_search_locations) or ()
    for place in map(Path, (*wheels, *_SYSTEM_CUDA)):
        if all((place / file).is_file() for file in _CUDA_FILES):
            return place
    raise _missing("GPUs", f"no folder has {' and '.join(_CUDA_FILES)}", "gpu")


def _find_spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None


def compiler_options(mesh: Mesh | AbstractMesh) -> dict[str, str]:
    """Return the XLA options to compile for a mesh; empty if its devices are present.

    XLA:GPU cannot time kernels on GPUs that are not present (autotuning is off), and
    reads its tools from where pip installed them.
    """
    if isinstance(mesh, AbstractMesh):
        return {}
    device = mesh.devices.flat[0]
    if device.platform not in ("gpu", "cuda") or not is_compile_only(device):
        return {}
    return {
        "xla_gpu_cuda_data_dir": str(cuda_dir()),
        "xla_gpu_autotune_level": "0",
        **only_nccl(),
    }


def _missing(what: str, numbers: str, extra: str) -> HardwareError:
    return HardwareError(
        f"the compiler for {what} is not installed.",
        numbers=numbers,
        fix=f"pip install 'rhino_jax[{extra}]'; it needs no {what[:-1]}.",
    )


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables that are unset, and unset them again on exit."""
    added = {k: v for k, v in settings.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
