"""What ships: every package, the configurations, the mark of types."""

from __future__ import annotations

import configparser
import tomllib
from pathlib import Path

import pytest

from rhino_jax.hardware.files import configs_dir


ROOT = Path(__file__).parents[2]
if not (ROOT / "setup.cfg").exists():
    pytest.skip("no source checkout", allow_module_level=True)


def _options() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_package_ships() -> None:
    listed = _options()["options"]["packages"].split()
    present = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in (ROOT / "rhino_jax").rglob("__init__.py")
    }
    assert sorted({*present, "rhino_jax", "rhino_jax.configs"}) == listed


def test_every_configuration_ships() -> None:
    patterns = _options()["options.package_data"]["rhino_jax.configs"].split()
    shipped = {p for pattern in patterns for p in configs_dir().glob(pattern)}
    assert {p for p in configs_dir().rglob("*") if p.is_file()} == shipped


def test_types_ship() -> None:
    assert _options()["options.package_data"]["rhino_jax"].split() == ["py.typed"]
    assert (ROOT / "rhino_jax" / "py.typed").exists()


def test_project_and_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "TERMS AND CONDITIONS" in (ROOT / "LICENSE").read_text()
    names = {d.split(">")[0].split("<")[0] for d in project["dependencies"]}
    assert names == {"jax", "jaxlib", "numpy", "ortools", "optax"}
