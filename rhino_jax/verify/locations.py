"""The user's source lines in HLO text.

An instruction names its file and line itself (`source_file`, `source_line`), or, in
newer texts, a stack frame in the tables at the head of the module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


_FILE = re.compile(r'source_file="((?:\\.|[^"\\])*)"')
_LINE = re.compile(r"source_line=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")


def source_of(metadata: str, frames: Mapping[int, str]) -> str:
    """The user's line in an instruction's metadata, or empty."""
    frame = _FRAME.search(metadata)
    if frame is not None and int(frame.group(1)) in frames:
        return frames[int(frame.group(1))]
    file, line = _FILE.search(metadata), _LINE.search(metadata)
    if file is None:
        return ""
    return file.group(1).rsplit("/", 1)[-1] + (f":{line.group(1)}" if line else "")


_TABLE_ROW = re.compile(r"^(\d+) (.*)$")


def parse_frames(lines: Sequence[str]) -> dict[int, str]:
    """The tables of stack frames at the head of a module, as `file.py:12 (f)`."""
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
    return {
        number: places.get(_field(row, "file_location_id"), "")
        for number, row in tables.get("StackFrames", {}).items()
    }


def _place(row: str, tables: Mapping[str, Mapping[int, str]]) -> str:
    file = tables.get("FileNames", {}).get(_field(row, "file_name_id"), '""')
    function = tables.get("FunctionNames", {}).get(
        _field(row, "function_name_id"), '""'
    )
    short = function.strip('"').rsplit(".", 1)[-1]
    return f"{file.strip(chr(34)).rsplit('/', 1)[-1]}:{_field(row, 'line')} ({short})"


def _field(row: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", row)
    return int(found.group(1)) if found else 0
