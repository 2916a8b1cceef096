"""Rates of devices that are here: the fit is exact where the cost model is."""

import dataclasses
import functools
import re
import tomllib

import jax
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.bench import measure as m
from rhino_jax.bench.measure import hardware_file
from rhino_jax.cli import main
from rhino_jax.commands import benching
from rhino_jax.cost.collectives import collective_s
from rhino_jax.hardware.mesh import MeshAxis
from rhino_jax.ir.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL


NOTHING = m.Measured(
    kind="made up", num_devices=8, flops_per_s={"float32": 1e9}, hbm_bytes_per_s=1e9
)


@pytest.mark.parametrize("topology", ["barrier", "switch", "ring"])
def test_links_are_found_again(topology):
    axis = MeshAxis("inner", 8, 3e-6, 7e8, topology)
    samples = [
        m._Sample(kind, held, 8, held > 4096, collective_s(kind, held, [axis]))
        for kind in (ALL_REDUCE, ALL_GATHER, ALL_TO_ALL)
        for held in (0, 4 << 20)
    ]
    found = m._with_links(NOTHING, topology, samples)
    assert found.alpha_s == pytest.approx(3e-6)
    assert found.bytes_per_s == pytest.approx(7e8)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_emulated_devices_are_measured(monkeypatch):
    monkeypatch.setattr(m, "SAMPLES", 1)
    monkeypatch.setattr(m, "_grow", lambda seconds, size: (size, abs(seconds(size))))
    monkeypatch.setattr(m, "LARGE", 1 << 18)
    found = m.measure(jax.devices()[:2])
    assert found.num_devices == 2 and found.topology == "barrier"
    assert 1e8 < found.flops_per_s["float32"] < 1e13
    text = hardware_file(found, jax.devices()[:2], "my")
    written = tomllib.loads(text)
    assert {"name", "peak_flops_per_s", "memory", "tiers"} < set(written)
    assert written["tiers"][0]["alpha_s"] == pytest.approx(found.alpha_s, rel=1e-2)
    assert written["memory"]["hbm_bytes"] > 2**28


def test_the_file_that_is_written_loads_and_plans(monkeypatch, tmp_path, capsys):
    found = dataclasses.replace(
        NOTHING, kind='say "hi"', topology="switch", alpha_s=1e-6, bytes_per_s=1e9,
        error=0.1,
    )  # fmt: skip
    monkeypatch.setattr(benching, "measure", lambda devices: found)
    path = tmp_path / "my.toml"
    assert main(["measure", "--write", str(path)]) == 0
    target = rhino.load_target(path)
    assert target.name == "my" and target.device.kinds == ('say "hi"',)
    assert target.device.hbm_bytes_per_s == 1e9
    assert target.tiers[0].bytes_per_s == 1e9
    place = ["--mesh", "x=8", "--hardware", str(path), "--no-progress"]
    assert main(["plan", "mlp-tiny", "--level", "fast", *place]) == 0
    assert "my" in capsys.readouterr().out
    assert main(["measure", "--write", str(tmp_path / "no" / "my.toml")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_other_devices_than_are_there_are_refused(capsys):
    assert main(["measure", "--emulate", str(len(jax.devices()) + 1)]) == 2
    said = capsys.readouterr().err
    assert "`measure`" in said and "python -m rhino_jax measure" in said


@pytest.mark.parametrize("kind", sorted(m._OPS))
def test_what_is_timed_is_the_collective_and_copies(kind):
    """XLA:CPU's reduction of a leading dim took 20 times as long as the all-gather
    before it, so that eight devices were not measured within minutes."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("inner",), auto, devices=jax.devices()[:4])
    spec = jax.P("inner")
    op = jax.shard_map(
        functools.partial(m._OPS[kind], 4), mesh=mesh, in_specs=spec, out_specs=spec
    )
    x = np.arange(32, dtype=np.float32)
    text = jax.jit(op).lower(x).compile().as_text()
    assert len(re.findall(rf"= \S+ {kind}\(|= \(.*\) {kind}\(", text)) == 1
    assert not re.search(r" reduce\(", text)
    whole = x.reshape(4, 8)
    expected = whole.reshape(4, 4, 2).swapaxes(0, 1).reshape(-1)
    if kind != ALL_TO_ALL:
        expected = np.tile(whole.mean(0), 4)
    np.testing.assert_allclose(jax.jit(op)(x), expected)
