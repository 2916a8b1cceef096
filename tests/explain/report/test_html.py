from __future__ import annotations

import dataclasses
import re
from html import escape
from html.parser import HTMLParser

import pytest

from rhino_jax.explain.report.html import page
from rhino_jax.plan.records import PeakValue
from tests.plan.samples import sample_plan


VOID = {"meta", "br", "hr", "img", "link", "input", "wbr"}


class Reader(HTMLParser):
    """Collects tags, attributes and text; checks that tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if "style" not in self.open:
            self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open
    return reader


def test_html_tells_what_the_text_tells() -> None:
    plan = sample_plan()
    said = " ".join(read(plan._repr_html_().replace("<wbr>", "")).text)
    for section in plan.table().split("\n\n"):
        assert section.splitlines()[0] in said
    for words in ("P(('model', 'data'))", "model.py:12 (mlp)", "my_kernel (3x)"):
        assert words in said


def test_html_is_self_contained() -> None:
    html = page(sample_plan()._repr_html_(), title="plan")
    reader = read(html)
    assert not reader.tags & {"script", "link", "img", "iframe", "object"}
    names = {name for name, _ in reader.attributes}
    assert not names & {"src", "href", "onclick", "onload"}
    assert "http" not in html and "url(" not in html and "@import" not in html


EVIL = "<script>alert('x')</script>&\"'"


@pytest.mark.parametrize("full", [False, True])
def test_every_user_string_is_escaped(full: bool) -> None:
    plan = sample_plan()
    plan = dataclasses.replace(
        plan,
        program_name=EVIL,
        hardware=EVIL,
        inputs=(dataclasses.replace(plan.inputs[0], path=EVIL, dtype=EVIL),),
        collectives=(
            dataclasses.replace(plan.collectives[0], source=EVIL, reason=EVIL, op=EVIL),
        ),
        at_peak=(PeakValue(EVIL, 1, EVIL),),
        pins={EVIL: EVIL},
        notes=(EVIL,),
        recipes={EVIL: plan.predicted},
        mesh_axes=((EVIL, 4), ("model", 2)),
        in_leaf_positions=(0,),
    )
    reader = read(page(plan._repr_html_(), title=EVIL))
    assert "script" not in reader.tags
    assert " ".join(reader.text).count("alert('x')") >= 9


def test_bars_stay_in_their_cell() -> None:
    plan = sample_plan(at_peak=(PeakValue("more than the peak", 2**60),))
    reader = read(plan._repr_html_())
    styles = [v for k, v in reader.attributes if k == "style" and v]
    widths = [v for v in styles if v.startswith("width:")]
    assert widths
    assert all(0 <= float(v.removeprefix("width:").rstrip("%")) <= 100 for v in widths)


def test_every_cell_says_itself_how_it_is_aligned() -> None:
    """So that it is aligned also where a viewer drops the style sheet."""
    html = sample_plan()._repr_html_()
    cells = re.findall(r"<t[dh](?: [^>]*)?>", html)
    bare = [c for c in cells if "text-align:" not in c]
    assert set(bare) <= {"<th>"} and len(bare) < len(cells) / 20


def test_code_is_told_from_prose() -> None:
    note = "`my_op` gathers params['h'][0]['w']: P('data', ('a', 'b')) → P()"
    html = sample_plan(notes=(note,))._repr_html_()
    fragments = re.findall(r"<code>(.*?)</code>", html.replace("<wbr>", ""))
    for code in ("my_op", "params['h'][0]['w']", "P('data', ('a', 'b'))", "P()"):
        assert escape(code) in fragments


def test_copied_code_is_what_was_written() -> None:
    path = "opt_state[0].mu['layers'][3]['attention']['out']"
    leaf = dataclasses.replace(sample_plan().inputs[0], path=path)
    html = sample_plan(inputs=(leaf, *sample_plan().inputs[1:]))._repr_html_()
    assert path in "".join(read(html.replace("<wbr>", "")).text)
