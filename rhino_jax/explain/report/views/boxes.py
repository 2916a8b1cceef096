"""Boxes of drawings: placed by percent, so that text keeps its size in any width.

Positions are inline styles, as viewers drop style sheets. Colours are translucent over
those of the page, so that its text stays readable in light and dark themes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape


HUES = (210, 25, 140, 285, 50, 180, 330, 90)
"""Distinguishable hues, in degrees, in the order in which they are used."""

KEYS = re.compile(r"[^\W\d]\w*")
"""Matches the keys of a tree path that are names."""

CHARACTERS = 60
"""Characters of a 12 px label that fit in a drawing of 430 px, the narrowest; source:
system-ui, 7 px a character on average."""


def colour(hue: int | None, strength: float = 0.5) -> str:
    """Return a CSS background colour; gray without a hue."""
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
    labels: Sequence[str] | None = None,
    lines: int = 1,
    top: float = 0.0,
    height: float = 100.0,
) -> str:
    """Return a box, placed in percent of its container; the label only if it fits.

    Args:
      left, width: horizontal position and size, in percent.
      background: CSS colour.
      title: tooltip.
      label: text inside, shortened if needed.
      labels: texts of which the first that fits is shown; None: those of `label`.
      lines: number of lines of text that the box has room for.
      top, height: vertical position and size, in percent.
    """
    room = int(width / 100 * CHARACTERS) - 1
    room = room * lines * 3 // 4 if lines > 1 else room * lines
    texts = _shorter(label, room) if labels is None else labels
    shown = escape(next((x for x in texts if len(x) <= room), ""))
    return (
        f'<div class="box" title="{escape(title)}" style="position:absolute;'
        f"left:{left:.3f}%;width:{max(width, 0.05):.3f}%;top:{top:.3f}%;"
        f"height:{height:.3f}%;background:{background};overflow:hidden;"
        f'box-sizing:border-box;text-align:left">{shown}</div>'
    )


def _shorter(label: str, room: int) -> Iterator[str]:
    """Yield a label, then shorter forms of it.

    Of a path these are its last keys, then a truncated one; of a source line, the line
    without its function.
    """
    yield label
    yield label.partition(" (")[0]
    keys = KEYS.findall(label) if "[" in label else []
    for begin in range(len(keys)):
        yield ".".join(keys[begin:])
    if keys and room > 4:
        yield f"{keys[-1][: room - 1]}…"


def beside(left: float, words: str, *, top: float = 0.0, height: float = 100.0) -> str:
    """Return a label to the right of a box that ends at `left`, all in percent."""
    return (
        f'<div class="box" style="position:absolute;left:{left:.3f}%;'
        f"width:{100 - left:.3f}%;top:{top:.3f}%;height:{height:.3f}%;"
        "overflow:hidden;box-shadow:none;box-sizing:border-box;padding-left:.3em;"
        f'text-align:left;white-space:nowrap">{escape(words)}</div>'
    )


class Markup(str):
    """HTML, which is not escaped again."""


def row(label: str, inside: Sequence[str], height_em: float = 1.6) -> str:
    """Return a track of boxes, with its name at the left.

    Args:
      label: the name, as text or as `Markup`.
      inside: HTML of the boxes.
      height_em: height of the track, in em.
    """
    name = label if isinstance(label, Markup) else escape(label)
    return (
        '<div class="track" style="display:flex;text-align:left;margin:2px 0">'
        '<div class="name" style="flex:0 0 11em;overflow-wrap:anywhere">'
        f"{name}</div>"
        f'<div class="boxes" style="flex:1 1 auto;position:relative;'
        f'height:{height_em}em;min-width:0">{"".join(inside)}</div></div>'
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return the legend of (background, label) pairs."""
    parts = [
        f'<span class="key"><span class="swatch" style="display:inline-block;'
        f'width:.8em;height:.8em;background:{background}"></span>'
        f" {escape(words)}</span>"
        for background, words in entries
    ]
    return f'<div class="legend" style="text-align:left">{" ".join(parts)}</div>'
