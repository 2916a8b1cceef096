from __future__ import annotations

from pathlib import Path

import pytest

from rhino_jax.bench.errors import BenchError
from rhino_jax.bench.figures import figures_of
from rhino_jax.bench.readme import with_section, write_section
from rhino_jax.bench.table import cells_table, rows_table, to_markdown
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


def test_a_section_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("a\n<!-- bench:x -->\nold\n<!-- /bench:x -->\nb\n")
    write_section(path, "x", "new\n")
    write_section(path, "x", "newer\n")
    expected = "a\n<!-- bench:x -->\n\nnewer\n\n<!-- /bench:x -->\nb\n"
    assert path.read_text() == expected


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


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--readme"):
        write_section(tmp_path / "none.md", "x", "new")
