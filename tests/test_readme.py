"""What the README shows runs, and it stays short enough to be read."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import pytest

from rhino_jax.cli import main
from tests.cases import covering


ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCK = re.compile(r"(<!-- not run: .* -->\n)?```python\n(.*?)```", re.DOTALL)
NEEDS = ("flax", "equinox", "orbax")


def blocks() -> list[tuple[bool, int, str]]:
    """(whether it runs, its first line, its text) of every block of Python."""
    return [
        (not found.group(1), TEXT.count("\n", 0, found.start(2)), found.group(2))
        for found in BLOCK.finditer(TEXT)
    ]


def test_the_readme_is_short() -> None:
    lines = TEXT.splitlines()
    # The command that runs the tests is a single line.
    long = [x for x in lines if len(x) > 120 and not x.startswith("python3 -m venv")]
    assert len(lines) <= 250 and not long


def test_every_block_is_python() -> None:
    found = blocks()
    assert len(found) >= 6
    for _, line, text in found:
        compile("\n" * line + text, str(README), "exec")


def test_what_is_shown_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block after the other, as somebody would who tries them all."""
    assert len(jax.devices()) == 8
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    ran = 0
    for runs, line, text in blocks():
        if not runs or not _is_installed(text):
            continue
        exec(compile("\n" * line + text, str(README), "exec"), names)
        ran += 1
    assert ran >= 4
    assert (tmp_path / "plan.json").exists()


COMMANDS = re.findall(
    r"^python -m rhino_jax (\w+ (?!demo).*?)(?:  #.*)?$",
    TEXT,
    re.MULTILINE,
)
"""Arguments of `python -m rhino_jax`, without comments."""


@pytest.mark.parametrize("place", covering([0, 1], [1]))
def test_command_lines_run(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(COMMANDS) == 3
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    defined = blocks()[0][2].partition("(params, opt_state)")[0]
    (tmp_path / "train.py").write_text(defined, encoding="utf-8")
    shapes = re.findall(r"^#   (\w+ = .*?)   ", TEXT, re.MULTILINE)
    assert len(shapes) == 3
    (tmp_path / "shapes.toml").write_text("\n".join(shapes), encoding="utf-8")
    assert main(shlex.split(COMMANDS[place])) == 0


def _is_installed(text: str) -> bool:
    for name in NEEDS:
        if re.search(rf"^(import|from) {name}", text, re.MULTILINE):
            try:
                __import__(name)
            except ImportError:
                return False
    return True


def test_links_lead_somewhere() -> None:
    for file in (README, ROOT / "rhino_jax" / "bench" / "RESULTS.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", file.read_text("utf-8")):
            assert (file.parent / link).exists(), f"{file.name}: {link}"


def test_the_folder_holds_nothing_else() -> None:
    """Only what a user looks for stands beside the package."""
    if not (ROOT / ".git").exists():
        pytest.skip("only a checkout says what belongs to it")
    known = {
        "rhino_jax",
        "tests",
        "notebooks",
        "configs",
        "setup.cfg",
        "pyproject.toml",
    }
    known |= {"README.md", "LICENSE"}
    tracked = os.popen(f"git -C '{ROOT}' ls-files").read().split("\n")
    tops = {path.partition("/")[0] for path in tracked if path}
    assert {t for t in tops if not t.startswith(".")} <= known


def test_files_of_tests_have_names_of_their_own() -> None:
    """Without packages, pytest cannot tell two of one name apart, and runs nothing."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
