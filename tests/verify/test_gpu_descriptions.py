"""The descriptions of GPUs that ship, beside those inside of the CUDA plugin."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rhino_jax.hardware.compile_only import cuda_dir
from rhino_jax.hardware.files import configs_dir, hardware_names, load_target
from tests.verify.extras import skipped_without_extra


FOLDER = configs_dir() / "xla_gpu"
NAMES = sorted(path.stem for path in FOLDER.glob("*.txtpb"))
_KIND = re.compile(r'^device_description_str: "(.*)"$', re.MULTILINE)


def _text(name: str) -> str:
    return (FOLDER / f"{name}.txtpb").read_text(encoding="utf-8")


def _kind(text: str) -> str:
    found = _KIND.search(text)
    assert found is not None
    return found[1]


def test_every_gpu_is_described() -> None:
    gpus = {n for n in hardware_names() if load_target(n).tiers[0].name == "nvlink"}
    # CUDA 13 compiles for nothing older than compute capability 7.5.
    assert set(NAMES) == gpus - {"v100-16gb"} and len(NAMES) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_are_of_the_hardware_that_they_are_named_after(name: str) -> None:
    text = _text(name)
    target = load_target(name)
    assert _kind(text) in target.device.kinds
    held = int(re.findall(r"device_memory_size: (\d+)", text)[0])
    # What a process has of it is said in the hardware file.
    assert target.device.hbm_bytes < held < 1.5 * target.device.hbm_bytes
    rate = float(re.findall(r"memory_bandwidth: (\d+)", text)[0])
    assert rate == pytest.approx(target.device.hbm_bytes_per_s, rel=0.05)
    assert "MIG" not in text and "Source: " in text


_COMPILE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np
from rhino_jax.hardware.compile_only import compiler_options, gpu_devices
from rhino_jax.models import registry

mesh = Mesh(np.array(gpu_devices(Path(sys.argv[1]), 1, 4)).reshape(2, 2), ("x", "y"))

def shape(x):
    is_even = [n % 2 == 0 for n in x.shape[:2]]
    spec = P(*(axis if even else None for axis, even in zip("xy", is_even)))
    sharding = NamedSharding(mesh, spec if len(x.shape) > 1 else P())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

work = registry.get(sys.argv[2])
args = jax.tree.map(shape, work.abstract_args())
lowered = jax.jit(work.step, donate_argnums=work.donate_argnums).lower(*args)
print(lowered.compile(compiler_options(mesh)).as_text())
"""


def _compiled(description: Path, model: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(description), model],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@functools.cache
def _whole_texts() -> dict[str, str]:
    """Descriptions inside of the plugin, by the kind of device; 0.10 has none."""
    spec = importlib.util.find_spec("jax_plugins.xla_cuda13")
    assert spec is not None and spec.origin is not None
    data = (Path(spec.origin).parent / "xla_cuda_plugin.so").read_bytes()
    found = re.finditer(rb"gpu_device_info \{[^\0]*", data)
    texts = [match[0].decode() for match in found]
    return {_kind(text): text for text in texts if _KIND.search(text)}


@pytest.mark.compile_only
@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp-tiny", "gpt-tiny", "wide-resnet-tiny"])
@pytest.mark.parametrize("name", NAMES)
def test_programs_are_those_of_the_whole_description(
    name: str, model: str, tmp_path: Path
) -> None:
    with skipped_without_extra():
        cuda_dir()
    whole = _whole_texts().get(_kind(_text(name)))
    if whole is None:
        # Nothing to compare with: the 0.10 plugin carries no descriptions.
        return
    (tmp_path / "whole.txtpb").write_text(whole)
    expected = _compiled(tmp_path / "whole.txtpb", model)
    assert _compiled(FOLDER / f"{name}.txtpb", model) == expected
    assert "HloModule" in expected
