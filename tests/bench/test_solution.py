"""What others published as the best stages: read, refused, and planned."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.command import Command, run_command
from rhino_jax.bench.records import row_key
from rhino_jax.bench.rows.pipeline_run import plan_pipeline
from rhino_jax.bench.suite import load_suite, parse_suite


ROW = {
    "model": "gpt-tiny-unrolled",
    "regime": "plenty",
    "target": "cpu:4",
    "methods": ["alpa"],
    "alpa": {"stages": [2, 2], "microbatches": 4},
}


def _row(model: str = ROW["model"], **alpa: Any) -> Any:
    row = {**ROW, "model": model, "alpa": {**ROW["alpa"], **alpa}}
    suite = parse_suite({"kind": "pipelines", "rows": [row]}, name="a", file="a.toml")
    return suite.rows[0]


def test_its_stages_devices_and_micro_batches_are_planned() -> None:
    layers = {"params['layer_0']*": 0, "params['layer_1']*": 1}
    row = _row("mlp-tiny", stages=[1, 3], microbatches=8, pins=layers)
    found = plan_pipeline(row)
    assert not found.error and found.schedule == "1f1b"
    assert (found.places, found.micro_batches) == ((1, 3), 8)
    (again,) = parse_suite({"rows": [row.to_table()]}, name="a", file="").rows
    assert again == row and row_key(again) == row_key(row) != row_key(_row())


def test_all_devices_as_one_stage_are_one_mesh() -> None:
    row = _row("mlp-tiny", stages=[4], mesh={"x": 4})
    found = plan_pipeline(row)
    assert not found.places and found.micro_batches == 4 and found.mesh == {"x": 4}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alpa": [2, 2]}, "`alpa` is not a table"),
        ({"alpa": {"stages": [2, 2]}}, "has no `microbatches`"),
        ({"alpa": {"stages": 2, "microbatches": 4}}, "`stages` is not a list"),
        ({"alpa": {"stages": [2, 1], "microbatches": 4}}, "devices, 4 together"),
        ({"alpa": {"stages": [4], "microbatches": 0}}, "`microbatches` is not"),
        ({"alpa": {**ROW["alpa"], "mesh": {"x": 0}}}, "`mesh` is not a table"),
        ({"alpa": {**ROW["alpa"], "pins": {"a": -1}}}, "`pins` is not a table"),
        ({"alpa": {**ROW["alpa"], "layers": 2}}, "unknown key `layers`"),
        ({"alpa": None}, 'as the row has the method "alpa"'),
        ({"published": -0.5}, "`published` is not a number >= 0"),
        ({"per_microbatch": "batch_norm"}, "`per_microbatch` is not a list"),
    ],
)
def test_a_bad_one_is_told(change: dict[str, Any], words: str) -> None:
    row = {k: v for k, v in {**ROW, **change}.items() if v is not None}
    with pytest.raises(BenchError, match=re.escape(words)) as caught:
        parse_suite({"rows": [row]}, name="a", file="a.toml")
    assert "a.toml" in caught.value.where and caught.value.fix


def test_what_ships_is_on_the_cluster_of_the_paper() -> None:
    rows = load_suite("alpa").rows
    families = {row.model.split("-")[0] for row in rows}
    assert families == {"gpt", "moe", "wide"} and len(rows) >= 9
    for row in rows:
        assert row.target.startswith("v100-16gb:") and row.alpa is not None
        assert [m.name for m in row.methods] == ["alpa", "auto"]
        assert bool(row.per_microbatch) != row.model.startswith("gpt")
        assert max(row.alpa.stages) <= 8


@pytest.mark.parametrize(
    ("suite", "words"),
    [("quick", "methods of suites of kind"), ("pipelines", "nothing of what Alpa")],
)
def test_it_is_no_method_of_other_suites(suite: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        run_command(Command(suite=suite, is_list=True, methods=("alpa",)))
