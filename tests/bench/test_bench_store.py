from __future__ import annotations

import json
from pathlib import Path

import pytest

import rhino_jax
from rhino_jax.bench.errors import BenchError
from rhino_jax.bench.store import Store, in_order
from tests.bench.samples import VERSIONS, result


def test_results_come_back_as_they_went(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "new" / "folder", "quick")
    one = result("best", 3, notes=("a note",), candidates=({"name": "best"},))
    two = result("dp", None, status="out of memory", predicted=None)
    store.append(one)
    store.append(two)
    assert store.results() == {one.key: one, two.key: two}
    assert in_order(store.results(), [two.key, "other", one.key]) == (two, one)


def test_only_final_results_of_these_versions_are_finished(tmp_path: Path) -> None:
    store = Store.open(tmp_path, "quick")
    store.append(result("best", 3))
    store.append(result("dp", None, status="timeout"))
    store.append(result("fsdp", None, status="no plan"))
    store.append(result("zero1", 3, versions=VERSIONS | {"jax": "0.12"}))
    assert set(store.finished(VERSIONS)) == {"a-best", "a-fsdp"}


def test_the_last_result_of_a_cell_counts(tmp_path: Path) -> None:
    store = Store.open(tmp_path, "quick")
    store.append(result("dp", None, status="timeout"))
    store.append(result("dp", 5))
    assert store.results()["a-dp"].status == "ok"


def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path: Path) -> None:
    store = Store.open(tmp_path, "quick")
    store.append(result("best", 3))
    whole = store.lines.read_text()
    store.lines.write_text(whole + whole[:50])
    again = Store.open(tmp_path, "quick")
    again.append(result("dp", 4))
    assert set(again.results()) == {"a-best", "a-dp"}


@pytest.mark.parametrize("line", ["{}", "nonsense", json.dumps({"key": 1})])
def test_a_damaged_line_is_told(tmp_path: Path, line: str) -> None:
    store = Store.open(tmp_path, "quick")
    store.append(result("best", 3))
    with store.lines.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(BenchError, match="damaged") as caught:
        store.results()
    assert caught.value.where.endswith("quick.jsonl:2")


def test_suites_and_fresh_starts(tmp_path: Path) -> None:
    Store.open(tmp_path, "quick").append(result("best", 3))
    assert Store.open(tmp_path, "full").results() == {}
    assert set(Store.open(tmp_path, "quick").results()) == {"a-best"}
    assert Store.open(tmp_path, "quick", is_fresh=True).results() == {}


def test_the_package_is_no_place_for_results(tmp_path: Path) -> None:
    package = Path(rhino_jax.__file__).parent
    for folder in (package, package / "bench" / "results"):
        with pytest.raises(BenchError, match="not written into the package"):
            Store.open(folder, "quick")
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot be written"):
        Store.open(tmp_path / "file", "quick")
