"""Reports as self-contained HTML: no script, no network, for light and dark themes.

Colours are those of the surrounding page (`currentColor` at several opacities), so that
a report reads well in any notebook theme. Notebooks have their own style sheets, with
rules such as `.rendered_html td {text-align: right}` and `table-layout: fixed`; ours
take precedence by the specificity of an id. Alignment of cells and length of bars are
inline styles, which survive viewers that drop the style sheet. Every text is escaped.
`Displayed` is what all results share: text, and HTML for notebooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from rhino_jax.explain.report.line import one_line
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.story import tell
from rhino_jax.explain.report.text import sections_to_text
from rhino_jax.explain.report.views.views import views_of


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData


# `:is(#id, .class)` has the specificity of an id, whichever of them matches.
_ROOT = ":is(#rhino-report,.rhino-report)"

_STYLE = """
&{font:13px/1.45 system-ui,sans-serif;color:inherit;max-width:90em;text-align:left}
& h3{font:600 15px/1.4 system-ui,sans-serif;margin:.2em 0 .4em;color:inherit}
& details{display:block;margin:.5em 0}
& summary{display:list-item;cursor:pointer;font-weight:600;padding:.15em 0}
& .scroll{overflow-x:auto}
& table{border-collapse:collapse;table-layout:auto;width:auto;max-width:none;
 margin:.2em 0 .2em 1em;font:inherit;font-variant-numeric:tabular-nums;border:0;
 color:inherit;background:transparent}
& tr{background:transparent;border:0}
& tbody tr:hover{background:rgba(128,128,128,.15)}
& :is(th,td){padding:.12em 1em .12em 0;white-space:nowrap;vertical-align:top;
 line-height:1.45;font-weight:400;max-width:none;border:0;color:inherit;
 background:transparent}
& th{font-weight:600;opacity:.7}
& thead th{border-bottom:1px solid rgba(128,128,128,.5)}
& :is(th,td).wrap{white-space:normal;overflow-wrap:break-word}
& td.prose{min-width:12em}
& code{font:12px/1.45 ui-monospace,monospace;color:inherit;background:transparent;
 padding:0;border:0;white-space:inherit}
& .whole{white-space:nowrap}
& .marked :is(td,code){font-weight:700}
& td.bars{width:8em;min-width:2em;padding-right:0}
& .bar{display:inline-block;height:.7em;min-width:1px;background:currentColor;
 opacity:.35;border-radius:1px}
& p{margin:.2em 0 .2em 1em;max-width:72em;font-size:inherit;line-height:1.45;
 opacity:.85;overflow-wrap:break-word}
& details.rest summary{font-weight:400;margin-left:1em}
& details.ops{margin:0 0 0 1em}
& details.ops summary{font-weight:400}
& .op{margin-left:2em;overflow-wrap:anywhere}
& :is(.timeline,.memory,.treemap,.shardings,.network,.program,.compared,.scatter){
 margin:.2em 0 .6em 1em}
& .box{font-size:12px;line-height:1.6em;text-indent:2px;white-space:nowrap;
 box-shadow:inset -1px 0 rgba(128,128,128,.25);color:inherit}
& .treemap .box{white-space:normal;overflow-wrap:anywhere;line-height:1.35em}
& .treemap .box{box-shadow:inset 0 0 0 1px rgba(128,128,128,.3)}
& .key{display:inline-block;margin-right:1.2em;white-space:nowrap}
& .filter{display:block;font:inherit;color:inherit;background:transparent;
 border:1px solid rgba(128,128,128,.5);padding:.2em .5em;width:28em;max-width:100%}
& code.copied{background:rgba(128,128,128,.35)}
& .scroll.more{-webkit-mask-image:linear-gradient(to right,#000 85%,transparent);
 mask-image:linear-gradient(to right,#000 85%,transparent)}
& .scroll.more::before{content:"scroll sideways \\2192";position:sticky;left:0;
 font-size:11px;opacity:.7}
@media (max-width:900px){
& .track .name{flex-basis:7em!important}
& table,& p{margin-left:0}
& :is(th,td){padding-right:.7em}
& code{font-size:11px}
& td.bars{width:3em}
& td.prose{min-width:9em}}
""".replace("&", _ROOT)


def to_html(plan: PlanData) -> str:
    """Return the whole report of a plan, with drawings, as HTML."""
    head, *rest = tell(plan)
    sections = (head, *views_of(plan), *rest)
    return sections_to_html(sections, line=one_line(plan))


def page(body: str, *, title: str) -> str:
    """Return a complete HTML file around a report."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title></head>\n<body>{body}</body></html>\n"
    )


def sections_to_html(sections: tuple[Section, ...], *, line: str = "") -> str:
    """Return sections one below the other; the first is the head, the others fold."""
    head, *rest = sections
    parts = [f"<h3>{escape(head.title)}</h3>"]
    if line:
        parts.append(f"<p><code>{escape(line)}</code></p>")
    parts.append(_content(head))
    parts += [
        f"<details{' open' if s.is_open else ''}><summary>{escape(s.title)}</summary>"
        f"{_content(s)}</details>"
        for s in rest
    ]
    body = "\n".join(parts)
    return f'<div class="rhino-report"><style>{_STYLE}</style>\n{body}\n</div>'


def _content(section: Section) -> str:
    parts = [section.drawing]
    if section.facts:
        rows = "".join(
            f'<tr><th scope="row" style="{_LEFT}">{escape(name)}</th>'
            f'<td class="wrap" style="{_LEFT}">{_rich(value)}</td></tr>'
            for name, value in section.facts
        )
        parts.append(f"<table><tbody>{rows}</tbody></table>")
    is_drawn = section.draws_table and bool(section.drawing)
    if section.table is not None and section.table.rows and not is_drawn:
        parts.append(f'<div class="scroll">{_table(section.table)}</div>')
    for line in section.lines:
        if line.startswith("and ") and section.rest is not None and section.rest.rows:
            # The rows left out of the table, folded; the line counts them.
            shown = _table(section.rest.rows_of(0, MAX_ROWS))
            more = len(section.rest.rows) - MAX_ROWS
            note = f"<p>and {more} more: plan.table(full=True)</p>" if more > 0 else ""
            parts.append(
                f'<details class="rest"><summary>{_rich(line)}</summary>'
                f'<div class="scroll">{shown}</div>{note}</details>'
            )
        else:
            parts.append(f"<p>{_rich(line)}</p>")
    return "".join(parts)


MAX_ROWS = 500
"""Maximum number of rows written into a page; more make notebooks slow to open."""


_LEFT, _RIGHT = "text-align:left", "text-align:right"


def _table(table: Table) -> str:
    styles = [_RIGHT if a == ">" else _LEFT for a in table.align]
    header = "".join(
        f'<th style="{style}">{escape(name)}</th>'
        for name, style in zip(table.header, styles, strict=True)
    )
    if table.shares:
        header += "<th></th>"
    rows = []
    for i, row in enumerate(table.rows):
        cells = "".join(
            f'<td{_class_of(text, gives_way=j in table.shrink)} style="{style}">'
            f"{_rich(text)}</td>"
            for j, (text, style) in enumerate(zip(row, styles, strict=True))
        )
        if table.shares:
            percent = 100 * min(1.0, max(0.0, table.shares[i]))
            bar = (
                f'<span class="bar" style="width:{percent:.1f}%"></span>'
                if percent
                else ""
            )
            cells += f'<td class="bars" style="{_LEFT}">{bar}</td>'
        mark = ' class="marked"' if i in table.marked else ""
        rows.append(f"<tr{mark}>{cells}</tr>")
    return (
        f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _class_of(text: str, *, gives_way: bool) -> str:
    """Return a cell's class: shrinking columns wrap, others fit their content."""
    if not gives_way or len(text) <= _SHORT:
        return ""
    is_prose = len(text) > _PROSE and " " in text
    return ' class="wrap prose"' if is_prose else ' class="wrap"'


_SHORT = 16
"""Maximum number of characters of a cell that never wraps."""

_PROSE = 24
"""Number of characters above which a text with spaces is prose, with a minimum column
width."""


_CODE = re.compile(
    r"`([^`]+)`"  # code quoted in notes
    r"|(\bP\((?:[^()]|\([^()]*\))*\))"  # a spec
    r"|([\w.*]+(?:\[[^\]\s]*\][\w.*]*)+(?::\d+)?)"  # a path, a type, a cell
)
_WORDS, _JOINTS = re.compile(r"(\s+)"), re.compile(r"(?<=.{8}[_./:])(?=.)")
_WHOLE = re.compile(r"\b[a-z]+(?:-[a-z]+)+\b")


def _rich(text: str) -> str:
    """Mark specs, paths and quoted text as code, and the rest as prose."""
    return "".join(_pieces(text))


def _pieces(text: str) -> Iterator[str]:
    end = 0
    for found in _CODE.finditer(text):
        yield _prose(text[end : found.start()])
        code = next(group for group in found.groups() if group)
        yield f"<code>{_breakable(code)}</code>"
        end = found.end()
    yield _prose(text[end:])


def _prose(text: str) -> str:
    """Escape prose: `all-gather` does not break; long words may at their dots."""
    parts = []
    for word in _WORDS.split(text):
        pieces = _JOINTS.split(word) if len(word) > _SHORT else [word]
        parts.append("<wbr>".join(map(escape, pieces)))
    return _WHOLE.sub(r'<span class="whole">\g<0></span>', "".join(parts))


def _breakable(code: str) -> str:
    """Escape code: a long path may break before keys, a spec between dims."""
    parts = re.split(r"(?<=.{8})(?=[\[.])|(?<=, )|(?<=.{20},)", code)
    return "<wbr>".join(escape(part) for part in parts if part)


class Displayed:
    """A result that shows itself; `print` it to read it."""

    __slots__ = ()

    def _line(self) -> str:
        """Return the result in one line; empty for none."""
        return ""

    def _sections(self, *, full: bool) -> tuple[Section, ...]:
        raise NotImplementedError

    def table(self, *, full: bool = False) -> str:
        """Return the whole report as text, at most 100 columns wide.

        Args:
          full: show every row, not only the first ones of long tables.
        """
        return sections_to_text(self._sections(full=full))

    def __repr__(self) -> str:
        return self._line()

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return sections_to_html(self._sections(full=False), line=self._line())
