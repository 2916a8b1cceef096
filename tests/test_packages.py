"""Every package says what comes in, what goes out, and how its files follow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rhino_jax


ROOT = Path(rhino_jax.__file__).parent

PACKAGES = (
    "analysis", "apply", "cost", "frontend", "hardware", "ir", "model", "plan",
    "planning", "recipes", "report", "search", "verify",
)  # fmt: skip

EXTENDED = ("cost", "frontend/rules", "hardware", "recipes", "report")
"""What outsiders add files or entries to."""


def page_of(package: str) -> str:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    return ast.get_docstring(tree) or ""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_page_names_files_that_are_there(package: str) -> None:
    page = page_of(package)
    assert len(page.splitlines()) <= 15
    for part in ("In: ", "Out: ", "Order: "):
        assert f"\n{part}" in page
    order = page.partition("\nOrder: ")[2].partition("\n\n")[0]
    files = [name for name in re.findall(r"`([a-z_]+)`", order)]
    assert len(files) > 2
    here = ROOT / package
    missing = [
        f for f in files if not ((here / f"{f}.py").exists() or (here / f).is_dir())
    ]
    assert missing == []


@pytest.mark.parametrize("package", EXTENDED)
def test_what_is_extended_says_how(package: str) -> None:
    page = page_of(package)
    assert "\nTo add " in page
    assert len(page.splitlines()) <= 15
