"""Run notebooks, and compare what they show with the outputs that they are stored with.

    python .ci/notebooks.py notebooks/04_pipelines.ipynb …      compares
    python .ci/notebooks.py --write notebooks/*.ipynb           stores new outputs

Every cell must show the same kinds of things (printed text, an object as text or HTML)
as its stored outputs; of a cell with the tag `stable`, the text must be equal. Times
and plans change with machine and version, so most cells have no tag. What is printed
to stderr is not stored. Needs `pip install -e '.[notebook]'`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800
_TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/tmp\w+")


def main(words: list[str]) -> int:
    """Run the notebooks of a command line; 1 where one fails or shows otherwise."""
    is_writing = "--write" in words
    status = 0
    for path in (Path(w) for w in words if w != "--write"):
        before = nbformat.read(path, as_version=4)
        after = nbformat.read(path, as_version=4)
        try:
            executed(after, path.parent)
        except CellExecutionError as error:
            print(f"{path}: {error}", file=sys.stderr)
            status = 1
            continue
        if is_writing:
            nbformat.write(after, path)
            print(f"{path}: written, {path.stat().st_size:,} bytes")
            continue
        for difference in differences(before, after):
            print(f"{path}: {difference}", file=sys.stderr)
            status = 1
    return status


def executed(book: Any, folder: Path) -> None:
    """Run all cells; what they show is as it can be stored."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    client = NotebookClient(
        book,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    clean(book)


def clean(book: Any) -> None:
    """Remove stderr and this machine's paths from the outputs of a notebook, in place;
    what the kernel adds to its metadata, too."""
    book.metadata.language_info = {"name": "python"}
    for cell in code_cells(book):
        cell.metadata.pop("execution", None)
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        for output in cell.outputs:
            if "text" in output:
                output.text = portable(output.text)
            for kind, content in output.get("data", {}).items():
                if isinstance(content, str):
                    output.data[kind] = portable(content)


def portable(text: str) -> str:
    text = _TEMPORARY.sub("/tmp/…", text)
    return text.replace(f"{ROOT}/", "").replace(f"{Path.home()}/", "~/")


def code_cells(book: Any) -> Iterator[Any]:
    return (cell for cell in book.cells if cell.cell_type == "code")


def differences(before: Any, after: Any) -> Iterator[str]:
    """What a notebook shows otherwise than it is stored, cell by cell."""
    for old, new in zip(code_cells(before), code_cells(after), strict=True):
        kinds = shown(old), shown(new)
        if kinds[0] != kinds[1]:
            yield f"cell {old.id} shows {kinds[1]}, stored is {kinds[0]}: --write"
        elif "stable" in old.metadata.get("tags", ()) and text(old) != text(new):
            yield f"cell {old.id} (stable) prints\n{text(new)}\nstored is\n{text(old)}"


def shown(cell: Any) -> list[str]:
    """The kinds of what a cell shows; text in several parts counts once."""
    found = []
    for output in cell.outputs:
        found += [output.get("name", ""), *output.get("data", {})]
    return sorted({kind for kind in found if kind})


def text(cell: Any) -> str:
    return "".join(o.get("text", "") for o in cell.outputs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
