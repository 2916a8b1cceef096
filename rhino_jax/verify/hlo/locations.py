"""The user's source lines in HLO text.

An instruction names its file and line itself (`source_file`, `source_line`), or, in
newer texts, a stack frame in the tables at the head of the module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rhino_jax.frontend.cells import cell_of
from rhino_jax.frontend.provenance import is_library_file


_RUNTIME = str(Path(__file__).parents[2] / "runtime")

_FILE = re.compile(r'source_file="((?:\\.|[^"\\])*)"')
_LINE = re.compile(r"source_line=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")


def source_of(metadata: str, frames: Mapping[int, str]) -> str:
    """Return the user's source line in an instruction's metadata, or empty."""
    frame = _FRAME.search(metadata)
    if frame is not None and int(frame.group(1)) in frames:
        return frames[int(frame.group(1))]
    file, line = _FILE.search(metadata), _LINE.search(metadata)
    if file is None:
        return ""
    return _short(file.group(1)) + (f":{line.group(1)}" if line else "")


_TABLE_ROW = re.compile(r"^(\d+) (.*)$")


def parse_frames(lines: Sequence[str]) -> dict[int, str]:
    """Parse the stack frame tables at the head of a module into `file.py:12 (f)`."""
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] | None = None
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif current is not None:
            row = _TABLE_ROW.match(line)
            if row is not None:
                current[int(row.group(1))] = row.group(2)
            elif line.startswith(("ENTRY", "%")):
                break
    places = {
        number: _place(row, tables)
        for number, row in tables.get("FileLocations", {}).items()
    }
    frames = {
        number: (places.get(_field(row, "file_location_id")), row)
        for number, row in tables.get("StackFrames", {}).items()
    }
    return {number: _users_line(number, frames) for number in frames}


def _users_line(
    number: int, frames: Mapping[int, tuple[tuple[str, str] | None, str]]
) -> str:
    """Return the source line of the innermost frame outside libraries such as optax.

    Where all frames are in libraries, it is the line of the frame itself. Empty for
    what applies a plan to an argument: the line around that is where the program is
    lowered, not a line of the program.
    """
    at = number
    while at in frames:
        place, row = frames[at]
        if place is not None and place[0].startswith(_RUNTIME):
            return ""
        if place is not None and not is_library_file(place[0]):
            return place[1]
        # One more than the parent's number: 1 stands for none.
        at = _field(row, "parent_frame_id") - 1
    own, _ = frames[number]
    return "" if own is None else own[1]


def _place(row: str, tables: Mapping[str, Mapping[int, str]]) -> tuple[str, str]:
    """Return the file of a location, and its line as `file.py:12 (f)`."""
    file = tables.get("FileNames", {}).get(_field(row, "file_name_id"), "")
    name = tables.get("FunctionNames", {}).get(_field(row, "function_name_id"), "")
    file, name = file.strip('"'), name.strip('"').rsplit(".", 1)[-1]
    return file, f"{_short(file)}:{_field(row, 'line')} ({name})"


def _short(file: str) -> str:
    return cell_of(file).rsplit("/", 1)[-1]


def _field(row: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", row)
    return int(found.group(1)) if found else 0
