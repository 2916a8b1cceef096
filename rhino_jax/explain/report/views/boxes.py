"""Boxes of drawings: placed by percent, so that text keeps its size in any width.

What places a box stands in the element, as viewers drop style sheets. Colours are laid
thinly over the page's own, so that its text stays readable in light and dark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape


HUES = (210, 25, 140, 285, 50, 180, 330, 90)
"""Degrees of hues that are told apart, in the order in which they are given."""

_KEYS = re.compile(r"[^\W\d]\w*")

CHARACTERS = 60
"""Of a label of 12 px, in a drawing of 430 px, the narrowest that is meant; source:
system-ui, 7 px a character on average."""


def colour(hue: int | None, strength: float = 0.5) -> str:
    """A colour for a background; without a hue, gray."""
    if hue is None:
        return f"rgba(128,128,128,{strength * 0.6:.2f})"
    return f"hsla({hue},70%,50%,{strength:.2f})"


def box(
    left: float,
    width: float,
    background: str,
    *,
    title: str,
    label: str = "",
    top: float = 0.0,
    height: float = 100.0,
) -> str:
    """A box, all in percent of what it lies in; the label only where it has room."""
    room = int(width / 100 * CHARACTERS) - 1
    shown = escape(next((x for x in _shorter(label, room) if len(x) <= room), ""))
    return (
        f'<div class="box" title="{escape(title)}" style="position:absolute;'
        f"left:{left:.3f}%;width:{max(width, 0.05):.3f}%;top:{top:.3f}%;"
        f"height:{height:.3f}%;background:{background};overflow:hidden;"
        f'box-sizing:border-box;text-align:left">{shown}</div>'
    )


def _shorter(label: str, room: int) -> Iterator[str]:
    """A label, and what is left of it where there is less room, in characters: the end
    of a path, and as much of that as there is room for; a line without its function."""
    yield label
    yield label.partition(" (")[0]
    keys = _KEYS.findall(label) if "[" in label else []
    for begin in range(len(keys)):
        yield ".".join(keys[begin:])
    if keys and room > 4:
        yield f"{keys[-1][: room - 1]}…"


def beside(left: float, words: str, *, top: float = 0.0, height: float = 100.0) -> str:
    """Words at the right of what ends at `left`, all in percent; they take what room
    there is."""
    return (
        f'<div class="box" style="position:absolute;left:{left:.3f}%;'
        f"width:{100 - left:.3f}%;top:{top:.3f}%;height:{height:.3f}%;"
        "overflow:hidden;box-shadow:none;box-sizing:border-box;padding-left:.3em;"
        f'text-align:left;white-space:nowrap">{escape(words)}</div>'
    )


def row(label: str, inside: Sequence[str], height_em: float = 1.6) -> str:
    """A line of boxes, with its name above where that is long, else at the left."""
    return (
        '<div class="track" style="display:flex;text-align:left;margin:2px 0">'
        '<div class="name" style="flex:0 0 11em;overflow-wrap:anywhere">'
        f"{escape(label)}</div>"
        f'<div class="boxes" style="flex:1 1 auto;position:relative;'
        f'height:{height_em}em;min-width:0">{"".join(inside)}</div></div>'
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(background, words) of every colour."""
    parts = [
        f'<span class="key"><span class="swatch" style="display:inline-block;'
        f'width:.8em;height:.8em;background:{background}"></span>'
        f" {escape(words)}</span>"
        for background, words in entries
    ]
    return f'<div class="legend" style="text-align:left">{" ".join(parts)}</div>'
