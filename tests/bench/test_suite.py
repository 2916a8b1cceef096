from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.methods import RECIPES, parse_method
from rhino_jax.bench.records import cell_key, row_key
from rhino_jax.bench.suite import load_suite, parse_suite, suite_names
from rhino_jax.hardware.files import load_target


ROW = {
    "model": "gpt-tiny",
    "overrides": {"batch": 64, "remat": False},
    "regime": "plenty",
    "target": "v5e:2x4",
    "mesh": {"data": 4, "model": 2},
    "methods": ["fsdp@matmul", "best", "best", "refined:5"],
}


def parse(*rows: dict[str, Any], **table: Any) -> Any:
    return parse_suite({"rows": list(rows), **table}, name="mine", file="mine.toml")


def test_a_row_is_what_the_file_says() -> None:
    suite = parse(ROW, timeout_s=60)
    (row,) = suite.rows
    assert (suite.name, suite.kind, suite.timeout_s) == ("mine", "compile", 60.0)
    assert row.workload == "gpt-tiny batch=64 remat=false"
    assert row.mesh == (("data", 4), ("model", 2))
    assert [m.name for m in row.methods] == ["fsdp@matmul", "best", "refined:5"]
    assert parse(row.to_table()).rows == (row,)


def test_a_row_may_have_a_share_of_the_memory() -> None:
    half, whole = parse(ROW | {"memory_share": 0.5}, ROW).rows
    assert half.workload == "gpt-tiny batch=64 remat=false memory=50%"
    assert (half.memory_share, whole.memory_share) == (0.5, None)
    assert parse(half.to_table()).rows == (half,)
    assert row_key(half) != row_key(whole)


def test_a_row_may_leave_some_room_above_the_least_memory() -> None:
    none, some = parse(ROW | {"memory_room": 0}, ROW | {"memory_room": 0.25}).rows
    assert some.workload == "gpt-tiny batch=64 remat=false room=25%"
    assert (none.memory_room, some.memory_room, some.memory_share) == (0.0, 0.25, None)
    assert parse(some.to_table()).rows == (some,)
    assert row_key(none) != row_key(some)


def test_a_row_may_say_how_much_memory_there_is() -> None:
    few, many = parse(ROW | {"memory": "6GiB"}, ROW | {"memory": "60 GB"}).rows
    assert few.workload.endswith("memory=6GiB")
    assert parse(few.to_table()).rows == (few,)
    assert len({row_key(few), row_key(many), row_key(parse(ROW).rows[0])}) == 3


def test_rows_take_the_methods_of_the_suite_unless_they_name_their_own() -> None:
    bare = {k: v for k, v in ROW.items() if k != "methods"} | {"target": "h100:8"}
    suite = parse(ROW, bare, methods=["dp"])
    assert [len(r.methods) for r in suite.rows] == [3, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "gpt-tiy"}, "`model` is not a model. Did you mean 'gpt-tiny'"),
        ({"regime": "much"}, "`regime` is not 'plenty' or 'little'"),
        ({"overrides": {"bach": 1}}, "unknown key `bach`"),
        ({"overrides": [1]}, "`overrides` is not a table"),
        ({"mesh": {"data": 4}}, "`mesh` is not axes of 8 devices together"),
        ({"mesh": {"data": True, "model": 8}}, "`mesh` is not a table of axis sizes"),
        ({"target": "v5e"}, "`target` is not a target with its topology"),
        ({"target": "v9:2x4"}, "hardware 'v9' is not known"),
        ({"methods": []}, "`methods` is not a list"),
        ({"methods": ["fsdq"]}, "'fsdq' is not known. Did you mean 'fsdp'"),
        ({"methods": ["best@matmul"]}, "'best@matmul' is not known"),
        ({"methods": ["refined:1"]}, "'refined:1' is not known"),
        ({"methods": ["fsdp:2"]}, "'fsdp:2' is not known"),
        ({"devices": 8}, "unknown key `devices`"),
        ({"memory_share": 0}, "`memory_share` is not a share"),
        ({"memory_share": 1.5}, "`memory_share` is not a share"),
        ({"memory_share": True}, "`memory_share` is not a share"),
        ({"memory": "6G"}, "`memory` is not a size"),
        ({"memory_room": -0.1}, "`memory_room` is not a share"),
        ({"memory_room": "all"}, "`memory_room` is not a share"),
        ({"memory_room": 0.5, "memory_share": 0.5}, "left out beside `memory_share`"),
    ],
)
def test_a_bad_row_is_told_in_four_parts(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError, match=re.escape(words)) as caught:
        parse(ROW, ROW | change)
    error = caught.value
    assert "row 2" in error.what and "mine.toml" in error.where
    assert error.numbers and error.fix


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"rows": []}, "`rows` is not one or more tables"),
        ({}, "the suite has no `rows`"),
        (
            {"rows": [ROW], "kind": "run"},
            "`kind` is not 'compile' or 'clock'",
        ),
        ({"rows": [ROW], "timeout_s": 0}, "`timeout_s` is not a number of seconds"),
        ({"rows": [ROW], "rowz": 1}, "unknown key `rowz`. Did you mean 'rows'"),
        ({"rows": [ROW, ROW]}, "rows 1 and 2 of the suite are the same"),
    ],
)
def test_a_bad_suite_is_told(table: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError, match=re.escape(words)):
        parse_suite(table, name="mine", file="mine.toml")


def test_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="Did you mean 'quick'"):
        load_suite("quik")
    with pytest.raises(BenchError, match="cannot be read"):
        load_suite(str(tmp_path / "none.toml"))
    path = tmp_path / "own.toml"
    path.write_text("rows = [")
    with pytest.raises(BenchError, match="cannot be read"):
        load_suite(str(path))


def test_keys_tell_cells_apart_and_are_file_names() -> None:
    same_label = ROW | {"mesh": {"a": 4, "b": 2}}
    suite = parse(ROW, ROW | {"overrides": {"batch": 32}}, same_label)
    keys = [cell_key(r, m) for r in suite.rows for m in r.methods]
    assert len(set(keys)) == len(keys) == 9
    assert all(re.fullmatch(r"[\w.+-]+", key) for key in keys)
    assert len({row_key(r) for r in suite.rows}) == 3


@pytest.mark.parametrize("name", suite_names())
def test_what_ships_is_well_formed(name: str) -> None:
    suite = load_suite(name)
    devices = [load_target(r.target).num_devices for r in suite.rows]
    assert all(devices)
    for row in suite.rows:
        if suite.kind == "plan":
            wanted = ["best"] if row.memory_room is not None else ["fast", "best"]
            assert [m.name for m in row.methods] == wanted
            continue
        if suite.kind == "stages":
            assert row.microbatches and not row.mesh
            continue
        if suite.kind in ("pipelines", "calls", "scale"):
            assert not row.mesh or "stage" in dict(row.mesh), "the axis of stages"
            continue
        assert row.mesh, "figures compare methods on one mesh"
        # What memory costs is compared between programs, not between recipes; and steps
        # on real devices with their predictions.
        is_alone = row.memory or suite.kind == "device"
        assert is_alone or any(m.is_recipe for m in row.methods)


def test_the_full_suite_is_what_was_promised() -> None:
    suite = load_suite("full")
    assert {r.target for r in suite.rows} == {
        "v5e:4x4", "v5e:8x8", "v5p:4x4x4", "v6e:16x16", "h100:8", "h100:8x8",
    }  # fmt: skip
    regimes: dict[str, set[str]] = {}
    for row in suite.rows:
        regimes.setdefault(row.model, set()).add(row.regime)
        assert {"best", "refined"} <= {m.name for m in row.methods}
    assert len(regimes) == 8
    assert all(found == {"plenty", "little"} for found in regimes.values())
    assert sum(len(r.methods) for r in suite.rows) >= 60


@pytest.mark.parametrize(
    "name", [*RECIPES, "fsdp@matmul", "best", "refined", "refined:7"]
)
def test_methods_are_named_as_they_are_read(name: str) -> None:
    assert parse_method(name).name == name
