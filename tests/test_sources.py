"""Files that comments, docstrings and configurations name are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.helpers_source import PACKAGE, TESTS, text_of


ROOT = TESTS.parent
OURS = (
    *("rhino_jax", "tests", "configs", "notebooks", ".ci", ".github"),
    *(path.parent.name for path in PACKAGE.glob("*/__init__.py")),
)
"""Folders at the top, or of the package, that a path of ours begins with."""

EXAMPLES = {"conftest.py: tests/a/test_b.py", "test_turns.py: tests/test_gone.py"}
"""Names that stand for any file."""

NAMED = re.compile(
    r"(?<![\w./-])((?:[\w.*-]+/)+[\w.*-]*\.(?:py|toml|md|txtpb|ipynb))\b"
)


def sources() -> Iterator[Path]:
    for folder in (PACKAGE, TESTS, ROOT / ".ci"):
        yield from folder.rglob("*.py")
    yield from (ROOT / "configs").rglob("*.toml")


def missing(text: str) -> list[str]:
    """Return the paths of ours in a text that name no file."""
    found = [name for name in NAMED.findall(text) if name.split("/")[0] in OURS]
    return [
        name
        for name in found
        if not any(any(folder.glob(name)) for folder in (ROOT, PACKAGE))
    ]


def test_files_that_are_named_are_there() -> None:
    here = [path for path in sources() if path != Path(__file__)]
    assert sum(len(NAMED.findall(text_of(path))) for path in here) > 50
    wrong = {f"{path.name}: {n}" for path in here for n in missing(text_of(path))}
    assert wrong == EXAMPLES


def test_a_file_that_is_gone_is_found() -> None:
    here = "`cost/compute.py`, configs/models/*.toml, jax/_src/prng.py"
    assert missing(here) == []
    gone = "see rhino_jax/cost/gone.py and `cost/gone.py` (tests/gone_*.py)."
    assert missing(gone) == [
        "rhino_jax/cost/gone.py",
        "cost/gone.py",
        "tests/gone_*.py",
    ]
