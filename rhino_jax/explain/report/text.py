"""Reports as plain text: aligned columns, no line longer than 100 characters, nothing
shortened."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.story import tell


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData

MAX_WIDTH = 100
_MIN_COLUMN = 12
"""Width in characters below which no column is wrapped."""


def to_text(plan: PlanData, *, full: bool = False) -> str:
    """Return the whole report of a plan as text."""
    return sections_to_text(tell(plan, full=full))


def sections_to_text(sections: tuple[Section, ...]) -> str:
    """Return sections one below the other, separated by blank lines."""
    return "\n\n".join("\n".join(_section_lines(s)) for s in sections)


def _section_lines(section: Section) -> list[str]:
    lines = []
    if section.title:
        first, *rest = wrapped(section.title, MAX_WIDTH - 2)
        lines += [first, *(f"  {line}" for line in rest)]
    names = [_clean(name) for name, _ in section.facts]
    width = min(max(map(display_width, names), default=0), MAX_WIDTH // 2)
    for name, (_, value) in zip(names, section.facts, strict=True):
        if display_width(name) > width:
            lines += _wrap(name, "  ")
            name = ""
        lines += _wrap(value, f"  {pad(name, width, '<')}  ")
    if section.table is not None and section.table.rows:
        lines += _table_lines(section.table)
    for line in section.lines:
        lines += _wrap(line, "  ")
    return lines


def _wrap(text: str, first: str) -> list[str]:
    rest = " " * display_width(first)
    parts = wrapped(text, MAX_WIDTH - len(rest))
    return [(first if i == 0 else rest) + part for i, part in enumerate(parts)]


def _table_lines(table: Table) -> list[str]:
    cells = [tuple(_clean(c) for c in row) for row in (table.header, *table.rows)]
    sentences = [""] * len(cells)
    if table.below is not None:
        sentences = [row[table.below] for row in cells]
        at = table.below
        cells = [(*row[:at], "", *row[at + 1 :]) for row in cells]
    lines = []
    for i, (row, sentence) in enumerate(
        zip(_fitted(cells, table), sentences, strict=True)
    ):
        margin = "> " if i - 1 in table.marked else "  "
        for line in row:
            lines.append(margin + line.rstrip())
            margin = "  "
        if sentence and i:
            lines += _wrap(sentence, _BELOW)
    return lines


def _fitted(cells: list[tuple[str, ...]], table: Table) -> list[list[str]]:
    """Return the lines of each row, none wider than the page and no text shortened: of
    the widths that are possible those with the fewest lines."""
    widths = [max(map(display_width, column)) for column in zip(*cells, strict=True)]
    if _total(widths) <= MAX_WIDTH:
        return [_row_lines(row, widths, table.align) for row in cells]
    first = range(widths[0], _MIN_COLUMN - 1, -4) if 0 in table.shrink else [widths[0]]
    found = [_shrunk([width, *widths[1:]], table.shrink) for width in first]
    fitting = [w for w in found if _total(w) <= MAX_WIDTH] or found[-1:]
    every = ([_row_lines(row, w, table.align) for row in cells] for w in fitting)
    return min(every, key=lambda rows: sum(map(len, rows)))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * sum(width > 0 for width in widths)


def _shrunk(widths: list[int], shrink: Sequence[int]) -> list[int]:
    """Return the widths with all shrinking columns but the first made narrower."""
    others = [i for i in shrink if i and widths[i] > 0]
    while others and _total(widths) > MAX_WIDTH:
        widest = max(others, key=lambda i: widths[i])
        if widths[widest] <= _MIN_COLUMN:
            break
        widths[widest] -= 1
    return widths


def _row_lines(row: Sequence[str], widths: Sequence[int], align: str) -> list[str]:
    """Return a row as lines. A first cell that does not fit has lines of its own, so
    that paths stay whole; the others wrap."""
    lines = []
    if display_width(row[0]) > widths[0]:
        lines, row = wrapped(row[0], MAX_WIDTH - 2), ("", *row[1:])
    parts = [wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for texts in zip_longest(*parts, fillvalue=""):
        padded = [
            pad(text, width, a)
            for text, width, a in zip(texts, widths, align, strict=True)
            if width
        ]
        lines.append("  ".join(padded))
    return lines


_BELOW = "      "
"""Indentation of a sentence that stands below its row."""


def display_width(text: str) -> int:
    """Return the number of columns that a terminal needs for a text."""
    return sum(_char_width(c) for c in text)


def _char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines: broken at spaces, words that are too long before keys,
    and elsewhere only where there is no such place."""
    lines, line = [], ""
    for word in _WORDS.findall(_clean(text)):
        if line and display_width(line + word.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        while display_width(word.rstrip()) > width > 0:
            head = _take(word, width) or word[0]
            keys = [m.start() for m in _KEY.finditer(head) if m.start()]
            if keys and display_width(head) < display_width(word):
                head = head[: keys[-1]]
            lines.append(head)
            word = word[len(head) :]
        line += word
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


_WORDS = re.compile(r"\S+ *| +")
_KEY = re.compile(r"[\[.](?=.)")


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
