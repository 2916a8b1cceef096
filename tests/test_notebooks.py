"""Notebooks are stored with what they show, for readers who do not run them.

`.ci/notebooks.py` runs them, compares, and stores outputs anew with --write.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest


BOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MAX_BYTES = 350_000
OF_A_MACHINE = re.compile(r"/(root|home/\w+|tmp/\w)|site-packages|Traceback")


def code_cells(book: Path) -> list[dict[str, Any]]:
    cells = json.loads(book.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_a_notebook_shows_what_its_cells_print(book: Path) -> None:
    cells = code_cells(book)
    assert all(cell["execution_count"] for cell in cells), "a cell was not run"
    for cell in cells:
        source = "".join(cell["source"])
        if re.search(r"^print\(", source, re.MULTILINE):
            assert cell["outputs"], f"{cell['id']} prints, and shows nothing"
    assert book.stat().st_size <= MAX_BYTES


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_outputs_are_of_no_machine(book: Path) -> None:
    for cell in code_cells(book):
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr"
            found = OF_A_MACHINE.search(json.dumps(output))
            assert found is None, f"{cell['id']}: {found}"


def differences(before: str, after: str, *tags: str, kind: str = "") -> list[str]:
    """Return what `.ci/notebooks.py` says of a notebook that shows another text."""
    books = pytest.importorskip("nbformat.v4")
    pytest.importorskip("nbclient")
    path = Path(__file__).parents[1] / ".ci" / "notebooks.py"
    ci = runpy.run_path(str(path))

    def book(text: str) -> Any:
        output = books.new_output("stream", text=text)
        if kind:
            output = books.new_output("display_data", {kind: text})
        cell = books.new_code_cell("", id="c", outputs=[output])
        cell.metadata.tags = list(tags)
        return books.new_notebook(cells=[cell])

    return [*ci["differences"](book(before), book(after))]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("step 13.4 ms, peak 2 GiB", "step  9.12 s, peak 512.5 MiB"),
        ("all-gather  1,024 MiB  −3 %", "all-gather  12 KiB  4.5e-05 s"),
        ("0: F0F1·B0·B1U", "0: F0─F1─F2B0·B1·B2··U"),
        ("███▌ compute", "█▌ compute"),
        ("fingerprint 1f0b3c5d7e9a", "fingerprint aaaaaaaabbbb"),
        ("\x1b[1;31m3 ms\x1b[0m", "\x1b[32m4 ms\x1b[m"),
    ],
)
def test_numbers_and_what_follows_from_them_may_differ(before: str, after: str) -> None:
    assert not differences(before, after)
    assert differences(before, after, "stable")


@pytest.mark.parametrize("after", ["reduce-scatter 3 ms", "all-gather 3 ms\nof state"])
def test_other_words_are_shown_as_a_diff(after: str) -> None:
    (found,) = differences("all-gather 4 ms", after)
    assert f"+{after.splitlines()[-1].replace('3 ms', '#')}" in found
    assert not differences("all-gather 4 ms", after, "varies")


def test_of_html_the_text_counts() -> None:
    page = '<style>a {{ b }}</style><p title="{}">peak {}</p>'
    old = page.format(1, "2 GiB")
    assert not differences(old, page.format("x", "3 GiB"), kind="text/html")
    assert differences(old, page.format(1, "memory"), kind="text/html")
