"""Reports as plain text: aligned columns, no line longer than 100 characters."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.story import tell


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData

MAX_WIDTH = 100
_MIN_COLUMN = 8


def to_text(plan: PlanData, *, full: bool = False) -> str:
    """Return the whole report of a plan as text."""
    return sections_to_text(tell(plan, full=full))


def sections_to_text(sections: tuple[Section, ...]) -> str:
    """Return sections one below the other, separated by blank lines."""
    return "\n\n".join("\n".join(_section_lines(s)) for s in sections)


def _section_lines(section: Section) -> list[str]:
    lines = []
    if section.title:
        lines.append(shorten(section.title, MAX_WIDTH))
    width = max((display_width(name) for name, _ in section.facts), default=0)
    width = min(width, MAX_WIDTH // 2)
    for name, value in section.facts:
        lines += _wrap(value, f"  {pad(shorten(name, width), width, '<')}  ")
    if section.table is not None and section.table.rows:
        lines += _table_lines(section.table)
    for line in section.lines:
        lines += _wrap(line, "  ")
    return lines


def _wrap(text: str, first: str) -> list[str]:
    rest = " " * display_width(first)
    room = MAX_WIDTH - len(rest)
    parts = textwrap.wrap(_clean(text), room, break_on_hyphens=False) or [""]
    return [
        (first if i == 0 else rest) + shorten(part, room)
        for i, part in enumerate(parts)
    ]


def _table_lines(table: Table) -> list[str]:
    cells = [tuple(_clean(c) for c in row) for row in (table.header, *table.rows)]
    sentences = [""] * len(cells)
    if table.below is not None:
        sentences = [row[table.below] for row in cells]
        cells = [_without(row, table.below) for row in cells]
    widths = [max(display_width(row[i]) for row in cells) for i in range(len(cells[0]))]
    gaps = 2 * sum(width > 0 for width in widths)
    while sum(widths) + gaps > MAX_WIDTH:
        widest = max(table.shrink, key=lambda i: widths[i])
        if widths[widest] <= _MIN_COLUMN:
            break
        widths[widest] -= 1
    lines = []
    columns = [
        shorten_apart(c, w)
        for c, w in zip(zip(*cells, strict=True), widths, strict=True)
    ]
    for i, row in enumerate(zip(*columns, strict=True)):
        padded = [
            pad(cell, width, align)
            for cell, width, align in zip(row, widths, table.align, strict=True)
            if width
        ]
        margin = "> " if i - 1 in table.marked else "  "
        lines.append(margin + "  ".join(padded).rstrip())
        if sentences[i] and i:
            lines += _wrap(sentences[i], _BELOW)
    return lines


_BELOW = "      "
"""Indentation of a sentence that stands below its row."""


def _without(row: tuple[str, ...], column: int) -> tuple[str, ...]:
    """Return the row with an empty column, which then takes no width."""
    return (*row[:column], "", *row[column + 1 :])


def display_width(text: str) -> int:
    """Return the number of columns that a terminal needs for a text."""
    return sum(_char_width(c) for c in text)


def _char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def shorten(text: str, width: int) -> str:
    """Shorten a text: tree paths lose quotes, then `…` replaces the middle."""
    text = _clean(text)
    if display_width(text) <= width:
        return text
    text = text.replace("['", "[").replace("']", "]")
    if display_width(text) <= width:
        return text
    tail = _take(text[::-1], (width - 1) // 2)[::-1]
    head = _take(text, width - 1 - display_width(tail))
    return f"{head}…{tail}"


def shorten_apart(texts: Sequence[str], width: int) -> list[str]:
    """Shorten texts to a width so that different ones remain different.

    Where the middle is replaced, the part that differs stays visible.
    """
    short = [shorten(text, width) for text in texts]
    alike: dict[str, dict[str, None]] = {}
    for text, fits in zip(texts, short, strict=True):
        alike.setdefault(fits, {})[text] = None
    apart: dict[str, str] = {}
    for same in alike.values():
        if len(same) > 1:
            apart.update(zip(same, _around_differences(list(same), width), strict=True))
    return [apart.get(text, fits) for text, fits in zip(texts, short, strict=True)]


def _around_differences(texts: Sequence[str], width: int) -> Iterator[str]:
    """Yield each text shortened around the words between the common prefix and suffix.

    Texts whose differing words do not fit are numbered.
    """
    plain = [_clean(t).replace("['", "[").replace("']", "]") for t in texts]
    head = _length_alike(plain)
    tail = _length_alike([text[head:][::-1] for text in plain])
    for i, text in enumerate(plain):
        start, end = head, len(text) - tail
        while start and text[start - 1].isalnum():
            start -= 1
        while end < len(text) and text[end].isalnum():
            end += 1
        words = text[start:end]
        room = width - display_width(words)
        if room < 2:
            number = f"…{i + 1}"
            rest = shorten(text, width - len(number)) if width > len(number) else ""
            yield _take(rest + number, width)
            continue
        before = _cut_to(text[:start], max(1, room // 2))
        after = _cut_to(text[end:][::-1], room - display_width(before))[::-1]
        yield before + words + after


def _length_alike(texts: Sequence[str]) -> int:
    """Return the length of the common prefix of all texts."""
    columns = zip(*texts, strict=False)
    return sum(1 for _ in takewhile(lambda column: len({*column}) == 1, columns))


def _cut_to(text: str, width: int) -> str:
    """Return the start of a text, with `…` for the part that does not fit."""
    return text if display_width(text) <= width else _take(text, width - 1) + "…"


def _take(text: str, width: int) -> str:
    """Return the longest prefix of a text that fits the width."""
    used = 0
    for i, char in enumerate(text):
        used += _char_width(char)
        if used > width:
            return text[:i]
    return text


def pad(text: str, width: int, align: str) -> str:
    space = " " * (width - display_width(text))
    return space + text if align == ">" else text + space


def _clean(text: str) -> str:
    """Replace line breaks and control characters by spaces, to keep columns."""
    return "".join(c if c.isprintable() else " " for c in text)
