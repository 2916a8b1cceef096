"""Run notebooks, and compare what they show with the outputs that they are stored with.

    python .ci/notebooks.py [notebooks/04_pipelines.ipynb …]    compares, all by default
    python .ci/notebooks.py --write [FILE …]                    stores new outputs

What a cell shows must have the same text as its stored outputs, numbers aside: these
change with the machine, and with every change of the cost model. Numbers include their
units and signs; the width of columns, bars and timelines follows from them. Of a cell
with the tag `stable` numbers are compared as well; one with the tag `varies` must show
the same kinds of things (printed text, an object as text or HTML) alone. What is
printed to stderr is not stored. Needs `pip install -e '.[notebook]'`.
"""

from __future__ import annotations

import difflib
import html
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
_NUMBER = re.compile(
    r"\b[0-9a-f]{12,}\b|[-+−]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?"
    r"( ?([nµm]?s|min|h|%|[KMGTP]i?B|B|[KMGTP]?FLOPs?|USD)(?![\w]))?"
)
_TIMELINE = re.compile(r"([FBIWMU](#(\.#)?)?[·─ ]*){4,}")
_BARS = re.compile(r"([-─━═=·█▉▊▋▌▍▎▏░▒▓])[-─━═=·█▉▊▋▌▍▎▏░▒▓]+")
_TAGS = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/tmp\w+")


def main(words: list[str]) -> int:
    """Run the notebooks of a command line; 1 where one fails or shows otherwise."""
    is_writing = "--write" in words
    status = 0
    files = [Path(word) for word in words if word != "--write"]
    for path in files or sorted((ROOT / "notebooks").glob("*.ipynb")):
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
    """Yield what a notebook shows otherwise than it is stored, cell by cell."""
    for old, new in zip(code_cells(before), code_cells(after), strict=True):
        tags = old.metadata.get("tags", ())
        kinds = shown(old), shown(new)
        if kinds[0] != kinds[1]:
            yield f"cell {old.id} shows {kinds[1]}, stored is {kinds[0]}: --write"
        elif "varies" not in tags:
            compared = list if "stable" in tags else without_numbers
            lines = compared(texts(old)), compared(texts(new))
            diff = difflib.unified_diff(*lines, "stored", "shown", n=1, lineterm="")
            if found := "\n".join(diff):
                yield f"cell {old.id} shows another text: --write\n{found}"


def without_numbers(lines: list[str]) -> list[str]:
    """Return lines of text without what changes with their numbers alone."""
    found = (_NUMBER.sub("#", line) for line in lines)
    found = (_BARS.sub(r"\1", _TIMELINE.sub("~", line)) for line in found)
    return [" ".join(line.split()) for line in found]


def shown(cell: Any) -> list[str]:
    """The kinds of what a cell shows; text in several parts counts once."""
    found = []
    for output in cell.outputs:
        found += [output.get("name", ""), *output.get("data", {})]
    return sorted({kind for kind in found if kind})


def texts(cell: Any) -> list[str]:
    """Return the lines of all that a cell shows; of HTML, those of its text."""
    found = []
    for output in cell.outputs:
        found.append(output.get("text", ""))
        for kind, content in sorted(output.get("data", {}).items()):
            content = content if isinstance(content, str) else ""
            is_html = kind == "text/html"
            found.append(
                html.unescape(_TAGS.sub("\n", content)) if is_html else content
            )
    plain = (_COLOURS.sub("", text) for text in found)
    lines = (line.rstrip() for text in plain for line in text.splitlines())
    return [line for line in lines if line]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
