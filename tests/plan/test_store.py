from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings, strategies as st

import rhino_jax as rhino
from rhino_jax.errors import PlanFileError
from rhino_jax.hardware.lowering import LoweringPolicy
from rhino_jax.plan.files.schema import SCHEMA_VERSION, current_versions
from rhino_jax.plan.files.store import checksum, plan_from_json, plan_to_json
from rhino_jax.plan.stages import (
    StageSend,
)
from tests.plan.samples import sample_plan, sample_stage


def test_a_saved_plan_comes_back_equal(tmp_path: Path) -> None:
    plan = sample_plan()
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.in_specs == plan.in_specs
    assert loaded.out_specs == plan.out_specs
    assert loaded.versions == current_versions()
    assert loaded.table() == plan.table()
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]


def test_waypoints_come_back() -> None:
    stage = sample_stage(
        waypoints={3: (((), (1,)), ((0,), (1,)))},
        through={(2, 1): (((0,), ()), ((), ()))},
        lowering=LoweringPolicy(gathers_by_axis=True, annotates_waypoints=False),
    )
    text = plan_to_json(sample_plan(stages=(stage,)))
    assert plan_from_json(text).decisions == stage.decisions
    assert "stops" not in text


def test_several_stages_come_back() -> None:
    """With devices that do not follow one another, and what one sends to the other."""
    send = StageSend(1, "add #7 (model.py:3)", 4096, 1e-6)
    first, second = (
        dataclasses.replace(
            sample_stage(),
            mesh_axes=(("data", 2), ("model", 2)),
            devices=devices,
            sends=sends,
        )
        for devices, sends in (((0, 1, 4, 5), (send,)), ((7, 6, 3, 2), ()))
    )
    plan = sample_plan(stages=(first, second))
    loaded = plan_from_json(plan_to_json(plan))
    assert loaded.stages == (first, second) and loaded == plan
    assert loaded.stages[0].compute_s == plan.predicted.compute_s
    assert loaded.stages[1].peak_bytes == plan.predicted.peak_bytes


def test_saving_a_loaded_plan_changes_nothing(tmp_path: Path) -> None:
    text = plan_to_json(sample_plan())
    assert plan_to_json(plan_from_json(text)) == text


def test_the_file_is_plain_json_also_with_infinite_numbers() -> None:
    search = dataclasses.replace(sample_plan().search, gap=math.inf, bound_s=-math.inf)
    text = plan_to_json(sample_plan(search=search))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(text, parse_constant=refuse)
    assert plan_from_json(text).search == search


def test_specs_are_readable_in_the_file() -> None:
    data = json.loads(plan_to_json(sample_plan()))
    assert data["inputs"][4]["path"] == "opt_state[0].mu['w2']"
    assert data["inputs"][4]["spec"] == [["model", "data"], []]


def test_reindenting_is_no_edit() -> None:
    data = json.loads(plan_to_json(sample_plan()))
    assert plan_from_json(json.dumps(data, indent=3)) == sample_plan()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_truncation_is_refused(data) -> None:
    text = plan_to_json(sample_plan()).rstrip()
    end = data.draw(st.integers(1, len(text) - 1))
    with pytest.raises(PlanFileError) as error:
        plan_from_json(text[:end])
    assert error.value.fix


def test_a_truncated_file_is_called_truncated() -> None:
    text = plan_to_json(sample_plan())
    in_a_word = text.index("true") + 2
    for end in (len(text) // 2, in_a_word, text.index("train_step") + 3):
        with pytest.raises(PlanFileError, match="truncated"):
            plan_from_json(text[:end])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("hello", "not JSON"),
        ('{"a": 1,}', "not JSON"),
        ("[1, 2]", "not a plan of rhino_jax"),
        ('{"format": "else"}', "not a plan of rhino_jax"),
        ("null", "not a plan of rhino_jax"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        plan_from_json(text)


def _edited(change) -> str:
    data = json.loads(plan_to_json(sample_plan()))
    change(data)
    return json.dumps(data)


def test_an_edited_plan_is_refused() -> None:
    text = _edited(lambda d: d["inputs"][0]["spec"].reverse())
    with pytest.raises(PlanFileError, match="edited") as error:
        plan_from_json(text)
    assert "pins=" in error.value.fix


def test_another_schema_version_is_refused_with_both_numbers() -> None:
    text = _edited(lambda d: d.update(schema_version=99))
    with pytest.raises(
        PlanFileError, match=f"got 99, this rhino_jax reads {SCHEMA_VERSION}"
    ):
        plan_from_json(text)


def test_missing_and_unknown_keys_are_named() -> None:
    def change(data):
        del data["recipes"], data["fingerprint"]
        data["recipe"] = {}

    with pytest.raises(PlanFileError) as error:
        plan_from_json(_edited(change))
    assert "missing: fingerprint, recipes; unknown: recipe" in str(error.value)


def test_content_that_does_not_fit_is_refused_although_its_checksum_is_right() -> None:
    def change(data):
        data["predicted"]["peak"] = data["predicted"].pop("peak_bytes")
        data["checksum"] = checksum(data)

    with pytest.raises(PlanFileError, match="does not fit its schema"):
        plan_from_json(_edited(change))


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    sample_plan().save(tmp_path / "monday.json")
    with pytest.raises(PlanFileError, match="Did you mean 'monday.json'"):
        rhino.load_plan(tmp_path / "monda.json")


def test_a_binary_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFileError, match="not text"):
        rhino.load_plan(tmp_path / "x")
    with pytest.raises(PlanFileError, match="cannot be read"):
        rhino.load_plan(tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    before = path.read_text()
    monkeypatch.setattr(Path, "replace", _fail)
    with pytest.raises(OSError, match="disk"):
        sample_plan(hardware="h100").save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As `/dev/stdout`: a pipe stays one."""
    path, got = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    sample_plan().save(path)
    reader.join(10)
    assert path.is_fifo() and plan_from_json(got[0]) == sample_plan()


def _fail(*_):
    raise OSError("disk")


def test_numpy_numbers_are_saved() -> None:
    import numpy as np

    predicted = dataclasses.replace(
        sample_plan().predicted, peak_bytes=np.int64(7), step_time_s=np.float64(0.5)
    )
    plan = plan_from_json(plan_to_json(sample_plan(predicted=predicted)))
    assert plan.predicted.peak_bytes == 7


def test_a_plan_without_trees_is_saved() -> None:
    plan = sample_plan(in_tree=None, out_tree=None)
    loaded = plan_from_json(plan_to_json(plan))
    assert loaded.in_tree is None
    assert loaded.decisions == plan.decisions


def test_a_loaded_plan_takes_a_mesh() -> None:
    loaded = plan_from_json(plan_to_json(sample_plan()))
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    assert rhino.Plan.of(loaded).with_mesh(mesh).in_shardings[2].mesh == mesh
