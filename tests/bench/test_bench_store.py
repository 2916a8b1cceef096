from __future__ import annotations

from pathlib import Path

import pytest

import rhino_jax
from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.records import Result
from rhino_jax.bench.store import Store
from tests.bench.samples import VERSIONS, result


def test_results_come_back_as_they_went(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "new" / "folder")
    one = result("best", 3, notes=("a note",), candidates=({"name": "best"},))
    store.save(one.key, one, VERSIONS)
    assert store.saved(one.key, Result, VERSIONS) == one
    assert store.saved("other", Result, VERSIONS) is None
    assert store.saved(one.key, Result, VERSIONS | {"jax": "0.12"}) is None
    again = result("best", 5)
    store.save(again.key, again, VERSIONS)
    assert store.saved(one.key, Result, VERSIONS) == again


@pytest.mark.parametrize("text", ["{}", "nonsense", '{"made_with": {}, "value": 1}'])
def test_a_damaged_result_is_computed_again(tmp_path: Path, text: str) -> None:
    store = Store.open(tmp_path)
    (tmp_path / "results" / "a.json").write_text(text)
    assert store.saved("a", Result, {}) is None


def test_fresh_starts(tmp_path: Path) -> None:
    Store.open(tmp_path).save("a", 1, {})
    assert Store.open(tmp_path).saved("a", int, {}) == 1
    fresh = Store.open(tmp_path, is_fresh=True)
    assert fresh.saved("a", int, {}) is None
    fresh.save("a", 2, {})
    assert Store.open(tmp_path).saved("a", int, {}) == 2


def test_the_package_is_no_place_for_results(tmp_path: Path) -> None:
    package = Path(rhino_jax.__file__).parent
    for folder in (package, package / "bench" / "results"):
        with pytest.raises(BenchError, match="not written into the package"):
            Store.open(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot be written"):
        Store.open(tmp_path / "file")
