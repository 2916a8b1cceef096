"""Reports as self-contained HTML: no script, no network, light and dark alike.

Colours are those of the page around (`currentColor` at several strengths), so that
a report reads well in any notebook theme, and still reads as plain tables where a
viewer drops the style sheet. Every text is escaped.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from rhino_jax.report.line import one_line
from rhino_jax.report.section import Section, Table
from rhino_jax.report.story import tell


if TYPE_CHECKING:
    from rhino_jax.plan.plan import Plan

_STYLE = """
.rhino-report{font:13px/1.45 system-ui,sans-serif;color:inherit;max-width:72em}
.rhino-report h3{font-size:1.15em;margin:.2em 0 .4em}
.rhino-report details{margin:.5em 0}
.rhino-report summary{cursor:pointer;font-weight:600;padding:.15em 0}
.rhino-report .scroll{overflow-x:auto}
.rhino-report table{border-collapse:collapse;margin:.2em 0 .2em 1em;
 font-variant-numeric:tabular-nums;color:inherit;background:transparent}
.rhino-report th,.rhino-report td{padding:.12em .8em .12em 0;text-align:left;
 white-space:nowrap;border:0;color:inherit;background:transparent}
.rhino-report th{font-weight:600;opacity:.65}
.rhino-report thead th{border-bottom:1px solid rgba(128,128,128,.5)}
.rhino-report .r{text-align:right}
.rhino-report code{font:12px/1.45 ui-monospace,monospace;color:inherit;
 background:transparent;padding:0}
.rhino-report .marked{font-weight:700}
.rhino-report .bar{display:inline-block;height:.7em;min-width:1px;
 background:currentColor;opacity:.35;border-radius:1px}
.rhino-report td.bars{width:8em;min-width:8em}
.rhino-report p{margin:.2em 0 .2em 1em;opacity:.8}
"""


def to_html(plan: Plan) -> str:
    """The whole story of a plan."""
    return sections_to_html(tell(plan), line=one_line(plan))


def page(body: str, *, title: str) -> str:
    """A file of its own around a report."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title></head>\n<body>{body}</body></html>\n"
    )


def sections_to_html(sections: tuple[Section, ...], *, line: str = "") -> str:
    """Sections one below the other; the first is the head, the others fold."""
    head, *rest = sections
    parts = [f"<h3>{escape(head.title)}</h3>"]
    if line:
        parts.append(f"<p><code>{escape(line)}</code></p>")
    parts.append(_content(head))
    parts += [
        f"<details open><summary>{escape(s.title)}</summary>{_content(s)}</details>"
        for s in rest
    ]
    body = "\n".join(parts)
    return f'<div class="rhino-report"><style>{_STYLE}</style>\n{body}\n</div>'


def _content(section: Section) -> str:
    parts = []
    if section.facts:
        rows = "".join(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
            for name, value in section.facts
        )
        parts.append(f"<table><tbody>{rows}</tbody></table>")
    if section.table is not None and section.table.rows:
        parts.append(f'<div class="scroll">{_table(section.table)}</div>')
    parts += [f"<p>{escape(line)}</p>" for line in section.lines]
    return "".join(parts)


def _table(table: Table) -> str:
    classes = [' class="r"' if a == ">" else "" for a in table.align]
    header = "".join(
        f"<th{cls}>{escape(name)}</th>"
        for name, cls in zip(table.header, classes, strict=True)
    )
    if table.shares:
        header += "<th></th>"
    rows = []
    for i, row in enumerate(table.rows):
        cells = "".join(
            f"<td{cls}>{_cell(text, is_first=j == 0)}</td>"
            for j, (text, cls) in enumerate(zip(row, classes, strict=True))
        )
        if table.shares:
            percent = 100 * min(1.0, max(0.0, table.shares[i]))
            bar = f'<span class="bar" style="width:{percent:.1f}%"></span>'
            cells += f'<td class="bars">{bar if percent else ""}</td>'
        mark = ' class="marked"' if i in table.marked else ""
        rows.append(f"<tr{mark}>{cells}</tr>")
    return (
        f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(text: str, *, is_first: bool) -> str:
    """Paths and specs are code; prose and numbers are not."""
    is_code = is_first or text.startswith("P(") or "[" in text
    return f"<code>{escape(text)}</code>" if is_code and text else escape(text)
