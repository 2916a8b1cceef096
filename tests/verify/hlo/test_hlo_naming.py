"""Every collective leads back to the user's operation and line."""

from __future__ import annotations

import pytest

from rhino_jax.verify.hlo.collectives.read import name_of
from rhino_jax.verify.hlo.module import parse_module
from tests.verify.hlo.test_hlo_compiled import EXACT, HLO, read


STORED = sorted(p.name.removesuffix(".hlo.gz") for p in HLO.glob("*.hlo.gz"))


@pytest.mark.parametrize("name", STORED)
def test_collectives_name_the_users_file(name: str) -> None:
    found = read(name)
    assert found
    # Between slices, what crosses first has no line in the text.
    nameless = 2 if name.startswith("one_of_each.v5e-2x") else 0
    named = [c for c in found if c.source.startswith("hlo_programs.py:")]
    assert len(named) >= len(found) - nameless
    assert all(c.op for c in found)


def test_all_stored_programs_are_tested() -> None:
    assert {name for name, _ in EXACT} <= set(STORED)


TEXT = """HloModule m, is_scheduled=true, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%inside (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %ar.1 = f32[8]{0} all-reduce(%q), to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %made = f32[8]{0} negate(%p), MADE
  %t = f32[8]{0} bitcast(%made)
  %ar = f32[8]{0} all-reduce(%t), to_apply=%add
  %f = f32[8]{0} fusion(%t), kind=kCustom, calls=%inside, metadata={op_name="called"}
  ROOT %r = f32[8]{0} negate(%ar), READ
}
"""
MADE = 'metadata={op_name="made" source_file="m.py" source_line=1}'
READ = 'metadata={op_name="read" source_file="r.py" source_line=2}'


def test_what_is_near_tells() -> None:
    module = parse_module(TEXT.replace("MADE", MADE).replace("READ", READ))
    main, inside = module.computations["main"], module.computations["inside"]
    nameless = main, main.instructions["ar"]
    assert name_of("all-reduce", nameless) == ("made", "m.py:1")
    assert name_of("all-gather", nameless) == ("read", "r.py:2")
    called = [(inside, inside.instructions["ar.1"]), (main, main.instructions["f"])]
    assert name_of("all-reduce", *called) == ("called", "m.py:1")
    alone = name_of("all-reduce", called[0])
    assert alone == ("ar.1", "")
