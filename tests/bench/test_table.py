from __future__ import annotations

from pathlib import Path

import pytest

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.tables.figures import figures_of
from rhino_jax.bench.tables.readme import (
    RESULTS as RESULTS_FILE,
    check_places,
    with_section,
    write_results,
)
from rhino_jax.bench.tables.table import (
    cells_table,
    changes_text,
    compiled_summary,
    rows_table,
    to_list,
    to_markdown,
)
from tests.bench.samples import measure, result


RESULTS = [
    result("dp", None, status="out of memory", predicted_ms=1),
    result("fsdp@matmul", 12.345, predicted=measure(11, 2.0, 3.0)),
    result("fast", 20),
    result(
        "best",
        10,
        predicted=measure(8, 4.0, 512.0),
        compiled=measure(10, 1.0, 256.0),
        plan_s=7.25,
    ),
]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_in_a_line() -> None:
    header, _, line, *_ = rows_table(RESULTS).splitlines()
    found = dict(zip(_cells(header), _cells(line), strict=True))
    assert found == {
        "workload": "model-a",
        "batch": "plenty",
        "target": "v5e:4x4",
        "mesh": "data=4 × model=4",
        "best recipe": "fsdp@matmul",
        "ms": "12.3",
        "fast ms": "20.0",
        "best ms": "10.0",
        "÷ recipe": "0.81",
        "sent GB": "0.00100 (0.00400)",
        "held GiB": "0.250 (0.500)",
        "plan s": "7.2",
    }


def test_the_last_columns_are_of_the_plan_that_took_most_effort() -> None:
    refined = result("refined", 9, compiled=measure(9, 1.0, 256.0), plan_s=70.0)
    table = rows_table([refined, *RESULTS])
    header, _, line, *_ = table.splitlines()
    names = [name for name in _cells(header) if name.endswith(" ms")]
    assert names == ["fast ms", "best ms", "refined ms"]
    assert _cells(line)[-1] == "70.0" and "are of `refined`" in table


def test_a_row_that_no_recipe_fits() -> None:
    results = [RESULTS[0], RESULTS[-1]]
    line = rows_table(results).splitlines()[2]
    assert "none fits" in line and "10.0" in line


def test_every_cell_in_a_line() -> None:
    lines = cells_table(RESULTS).splitlines()[2:]
    assert len(lines) == 4
    assert _cells(lines[0])[-1] == "out of memory"
    assert _cells(lines[1])[5] == "12.3 (11.0)"
    assert [_cells(x)[-1] for x in lines[1:]] == ["yes"] * 3


def test_tables_are_rectangular_whatever_is_in_them() -> None:
    odd = [
        result(
            "best", None, status="error", predicted=None, workload="a|b", plan_s=None
        )
    ]
    for table in (rows_table(odd), cells_table(odd), cells_table(RESULTS)):
        lines = [x for x in table.splitlines() if x.startswith("|")]
        assert len({x.replace("\\|", "").count("|") for x in lines}) == 1


def test_the_report_has_figures_versions_and_command() -> None:
    text = to_markdown(
        "quick", RESULTS, figures_of(RESULTS), "python -m rhino_jax bench"
    )
    assert "jax 0.10.2" in text and "`python -m rhino_jax bench`" in text
    assert "3 programs" in text
    assert "`best`: worst 0.810" in text
    assert text.index("| workload") < text.index("<details>")


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    """The README of a checkout."""
    path, results = tmp_path / "README.md", tmp_path / RESULTS_FILE
    results.parent.mkdir(parents=True)
    results.write_text("# Results\n")
    path.write_text("a\n<!-- bench:x -->\nold\n<!-- /bench:x -->\nb\n")
    return path


def test_sections_are_replaced_and_nothing_else(readme: Path) -> None:
    write_results(readme, "x", "new\n", "- new")
    write_results(readme, "x", "newer\n", "- newer")
    assert readme.read_text() == (
        "a\n<!-- bench:x -->\n- newer\n<!-- /bench:x -->\nb\n"
    )
    assert (readme.parent / RESULTS_FILE).read_text() == (
        "# Results\n\n## `x`\n\n<!-- bench:x -->\n\nnewer\n\n<!-- /bench:x -->\n"
    )


def test_a_readme_says_only_the_suites_that_it_has_a_place_for(readme: Path) -> None:
    old = readme.read_text()
    said = write_results(readme, "y", "table", "- line")
    assert readme.read_text() == old and str(readme) not in said
    assert "table" in (readme.parent / RESULTS_FILE).read_text()


def test_odd_marks_are_found_before_anything_is_written(readme: Path) -> None:
    readme.write_text("<!-- bench:x -->")
    for call in (
        lambda: check_places(readme, "x"),
        lambda: write_results(readme, "x", "t", "s"),
    ):
        with pytest.raises(BenchError, match="no place"):
            call()
    assert (readme.parent / RESULTS_FILE).read_text() == "# Results\n"


@pytest.mark.parametrize(
    "old",
    [
        "",
        "<!-- bench:x -->",
        "<!-- /bench:x -->\n<!-- bench:x -->",
        "<!-- bench:x --><!-- /bench:x --><!-- bench:x --><!-- /bench:x -->",
        "<!-- bench:y --><!-- /bench:y -->",
    ],
)
def test_a_file_without_a_place_is_left_alone(old: str) -> None:
    with pytest.raises(BenchError, match="no place") as caught:
        with_section(old, "x", "new", "README.md")
    assert caught.value.fix and caught.value.numbers


def test_what_is_no_checkout(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("")
    with pytest.raises(BenchError, match="--readme") as caught:
        write_results(tmp_path / "README.md", "x", "new", "- new")
    assert "RESULTS.md" in caught.value.where


def test_the_summary_says_how_plans_compare_and_how_true_they_are() -> None:
    lines = compiled_summary("quick", RESULTS, figures_of(RESULTS))
    text = to_list(lines)
    assert "`best` 0.81 to 0.81 (geometric mean 0.81)" in lines[0]
    assert "over 3 programs, median error: step time" in lines[1]
    assert max(map(len, text.splitlines())) <= 120
    assert all(line.startswith(("- ", "  ")) for line in text.splitlines())


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
