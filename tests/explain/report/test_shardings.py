"""Drawings of shards against JAX's own map of devices, and labels of areas."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from rhino_jax.explain.report.views.treemap import Area, _labels, treemap
from rhino_jax.explain.report.views.views import _devices, _drawn_dims, shardings
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.records import PeakValue
from tests.plan.samples import leaf, sample_plan


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (P("data"), ((0,), ())),
        (P(None, "model"), ((), (1,))),
        (P("model", "data"), ((1,), (0,))),
        (P(("data", "model")), ((0, 1), ())),
        (P(None, ("model", "data")), ((), (1, 0))),
        (P(), ((), ())),
    ],
)
def test_shards_are_on_the_devices_that_jax_gives_them(theirs: P, ours: Spec) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    place = {device: i for i, device in enumerate(mesh.devices.flat)}
    wanted: dict[tuple[int, ...], list[int]] = {}
    places = NamedSharding(mesh, theirs).devices_indices_map((16, 16))
    for device, index in places.items():
        starts = tuple(s.start or 0 for s in index)
        wanted.setdefault(starts, []).append(place[device])
    counts = [np.prod([(4, 2)[a] for a in dim], dtype=int) for dim in ours]
    split = [d for d, n in enumerate(counts) if n > 1]
    dims = _drawn_dims(split, 2)
    found = _devices(ours, dims, (4, 2))
    for (i, j), devices in found.items():
        starts = [0, 0]
        for side, dim in ((i, dims[0]), (j, dims[1])):
            if dim is not None:
                starts[dim] = side * 16 // counts[dim]
        assert sorted(wanted[tuple(starts)]) == devices


def test_each_sharding_is_drawn_once_with_its_dims() -> None:
    drawn = shardings(sample_plan())
    assert drawn.count('class="sharding"') == 5
    assert "<code>params[&#x27;w1&#x27;]</code>" in drawn
    assert "dim 0: 128 × dim 1: 512" in drawn
    assert 'title="devices 0 2 4 6"' in drawn
    assert shardings(sample_plan(mesh_axes=())) == ""


def test_large_meshes_draw_the_first_shards() -> None:
    axes, (stage,) = (("data", 32), ("model", 8)), sample_plan().stages
    wide = leaf("w", (4096, 512), ((0, 1), ()))
    stages = (dataclasses.replace(stage, mesh_axes=axes),)
    drawn = shardings(sample_plan(mesh_axes=axes, stages=stages, inputs=(wide,)))
    assert "the first of 256 × 1 shards" in drawn
    assert drawn.count('class="box"') == 16


def test_labels_of_areas_tell_them_apart() -> None:
    roots = ("params", "s[0].mu", "s[0].nu")
    paths = [f"{root}['blocks']['mlp']['up']" for root in roots]
    whats = [f"{n} × residuals of the scan f32[{n},8] m.py:7 (f)" for n in (2, 4)]
    reads = [f"dot f32[8] m.py:7 (f), reading {x}" for x in ("x", "params['up']")]
    areas = [Area(name, 8, "", True) for name in (*paths, *whats, *reads)]
    labels = _labels(areas)
    shown = [[label for label in every if len(label) <= 12] for every in labels]
    assert [x[0] for x in shown[:3]] == ["params…up", "mu…up", "nu…up"]
    assert [x[0] for x in shown[3:5]] == ["f32[2,8]", "f32[4,8]"]
    assert [x[-1] for x in labels[5:]] == ["dot reading x", "dot reading params['up']"]
    every = [label for area in labels for label in area]
    assert len(every) == len(set(every))


def test_activations_have_the_colour_of_their_axes() -> None:
    held = PeakValue("tanh f32[8,8]", 2**20, "m.py:7 (f)", "", "f32[2,8]", "P('data')")
    drawn = treemap(sample_plan(at_peak=(held,)))
    (found,) = re.findall(r'title="tanh[^"]*" style="[^"]*background:([^;]*);', drawn)
    legend = re.search(r'background:([^"]*)"></span> sharded over data<', drawn)
    assert legend is not None
    assert found.split(",")[0] == legend[1].split(",")[0]
