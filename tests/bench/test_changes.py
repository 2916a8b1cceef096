"""How steps have changed since an earlier run."""

from __future__ import annotations

from rhino_jax.bench.tables.table import changes_text
from tests.bench.samples import result


def test_ratios_by_method_and_what_fits_no_longer() -> None:
    earlier = [
        result("best", 10, row="a"),
        result("best", 10, row="b"),
        result("fast", 10, row="a"),
        result("best", None, row="c", status="out of memory"),
        result("best", 10, row="d"),
        result("best", 10, row="e"),
        result("best", 10, row="gone"),
    ]
    results = [
        result("best", 20, row="a"),
        result("best", 5, row="b"),
        result("fast", 11, row="a"),
        result("best", 10, row="c"),
        result("best", None, row="d", status="out of memory"),
        result("best", None, row="e", status="error"),
        result("best", 10, row="new"),
    ]
    assert changes_text(results, earlier, "old.json").splitlines() == [
        "Compiled step times over those of old.json, where both fit:",
        "- `best`, 2 rows: geometric mean 1.000, from 0.500 (model-b on v5e:4x4) to"
        " 2.000 (model-a on v5e:4x4)",
        "- `fast`, 1 rows: geometric mean 1.100, from 1.100 (model-a on v5e:4x4) to"
        " 1.100 (model-a on v5e:4x4)",
        "- fits no longer: model-d on v5e:4x4, best",
        "- fits now: model-c on v5e:4x4, best",
        "- not compared: model-e on v5e:4x4, best: error, was ok",
    ]


def test_nothing_in_both() -> None:
    text = changes_text([result("best", 1, row="a")], [result("best", 1, row="b")], "f")
    assert text.endswith("no cell is in both")
