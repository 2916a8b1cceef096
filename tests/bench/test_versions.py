from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import rhino_jax
from rhino_jax.bench import versions as versions_module
from rhino_jax.bench.versions import (
    compiler_versions,
    source_digest,
    versions,
    versions_line,
)
from rhino_jax.hardware.files import configs_dir


def test_versions_are_of_what_plans_and_compiles() -> None:
    found = versions()
    assert {"rhino_jax", "source", "python", "jax", "jaxlib"} <= set(found)
    line = versions_line(found)
    assert f"jax {found['jax']}" in line and found["source"] not in line


def test_flags_for_the_compilers_make_other_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def now() -> list[dict[str, str]]:
        versions.cache_clear()
        compiler_versions.cache_clear()
        return [versions(), compiler_versions()]

    monkeypatch.delenv("XLA_FLAGS")
    plain = now()
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert now() == plain
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_some_flag=true")
    flagged = now()
    assert all(a != b for a, b in zip(plain, flagged, strict=True))
    assert "--xla_tpu_some_flag=true" in versions_line(flagged[0])
    monkeypatch.undo()
    now()


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the source, in place of the real one."""
    ignored = shutil.ignore_patterns("__pycache__", "configs")
    root = tmp_path / "rhino_jax"
    shutil.copytree(Path(rhino_jax.__file__).parent, root, ignore=ignored)
    shutil.copytree(configs_dir(), tmp_path / "configs")
    monkeypatch.setattr(rhino_jax, "__file__", str(root / "__init__.py"))
    monkeypatch.setattr(versions_module, "configs_dir", lambda: tmp_path / "configs")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "is_another"),
    [
        ("rhino_jax/planner/search/driver.py", True),
        ("rhino_jax/frontend/rules/dot.py", True),
        ("rhino_jax/bench/planning.py", True),
        ("configs/hardware/v5e.toml", True),
        ("configs/models/gpt-tiny.toml", True),
        ("configs/bench/quick.toml", False),
        ("rhino_jax/bench/tables/table.py", False),
        ("rhino_jax/explain/report/text.py", False),
        ("rhino_jax/cli.py", False),
    ],
)
def test_an_edited_planner_is_another(copy: Path, file: str, is_another: bool) -> None:
    before = source_digest()
    with (copy / file).open("a") as source:
        source.write("# edited\n")
    assert (source_digest() != before) == is_another


@pytest.mark.parametrize(
    ("file", "is_another"),
    [
        ("rhino_jax/verify/compile.py", True),
        ("rhino_jax/_compat/devices.py", True),
        ("configs/xla_gpu/h100.txtpb", True),
        ("rhino_jax/planner/search/driver.py", False),
        ("rhino_jax/verify/hlo/reading.py", False),
        ("configs/hardware/v5e.toml", False),
    ],
)
def test_an_edited_planner_is_the_same_compiler(
    copy: Path, file: str, is_another: bool
) -> None:
    compiler_versions.cache_clear()
    before = compiler_versions()
    with (copy / file).open("a") as source:
        source.write("# edited\n")
    compiler_versions.cache_clear()
    assert (compiler_versions() != before) == is_another
    compiler_versions.cache_clear()
