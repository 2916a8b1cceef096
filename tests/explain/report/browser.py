"""Pages laid out by a real browser, and what is measured of them there."""

from __future__ import annotations

import functools
import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """Chromium; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"needs one of {', '.join(NAMES)}")
    return found


def notebook_page(
    outputs: Sequence[str], *, template: str, theme: str = "light"
) -> str:
    """A notebook of one cell per output, as nbconvert writes it: with the style sheet
    of Jupyter Lab, or of the classic notebook.

    Args:
      outputs: HTML of each.
      template: "lab" or "classic".
      theme: of Jupyter Lab, "light" or "dark".
    """
    nbformat = pytest.importorskip("nbformat")
    nbconvert = pytest.importorskip("nbconvert")
    make = nbformat.v4
    cells = []
    for text in outputs:
        output = make.new_output(
            "execute_result", {"text/html": text}, execution_count=1
        )
        cells.append(make.new_code_cell("plan", execution_count=1, outputs=[output]))
    exporter = nbconvert.HTMLExporter(template_name=template, theme=theme)
    body, _ = exporter.from_notebook_node(make.new_notebook(cells=cells))
    return body


KEPT_IN = "RHINO_SCREENSHOTS"
"""The environment variable that names the folder where pictures of pages are kept."""


def measure(page: str, width: int, folder: Path, name: str) -> list[dict[str, Any]]:
    """What the browser makes of every report on a page: see `measure.js`; and a picture
    of the page, where `KEPT_IN` names a folder.

    Args:
      page: HTML of all.
      width: of the window, in pixels.
      folder: for the page and the browser's profile.
      name: of the picture.
    Raises:
      AssertionError: the browser measures nothing.
    """
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"{_script()}</body>"), encoding="utf-8")
    shown = _browse(file, width, 2000, "--dump-dom")
    text = re.search(r'<pre id="measured">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert text is not None, shown.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(html.unescape(text.group(1)))
    kept = os.environ.get(KEPT_IN)
    if kept:
        picture = Path(kept).resolve() / f"{name.replace(' ', '-')}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page, encoding="utf-8")
        height = int(max(report["box"]["bottom"] for report in found)) + 40
        shown = _browse(file, width, height, f"--screenshot={picture}")
        assert picture.stat().st_size > 10_000, shown.stderr[-2000:]
    return found


def _browse(
    file: Path, width: int, height: int, act: str
) -> subprocess.CompletedProcess[str]:
    command = [
        find_browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={file.parent / 'profile'}",
        f"--window-size={width},{height}",
        "--virtual-time-budget=2000",
        act,
        file.as_uri(),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )


@functools.cache
def _script() -> str:
    code = (Path(__file__).parent / "measure.js").read_text(encoding="utf-8")
    return f"<script>{code}</script>"
