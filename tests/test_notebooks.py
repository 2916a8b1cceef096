"""Notebooks are stored with what they show, for readers who do not run them.

`.ci/notebooks.py` runs them, compares, and stores outputs anew with --write.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest


BOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MAX_BYTES = 300_000
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
