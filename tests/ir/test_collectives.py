"""Kinds of collectives: the records agree with each other."""

from __future__ import annotations

import pytest

from rhino_jax.cost.collectives import wire_bytes
from rhino_jax.ir.collectives import KINDS, OF_OPCODE, OF_PRIMITIVE, CollectiveKind


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_parts_move_as_many_bytes_as_the_whole(kind: CollectiveKind) -> None:
    parts = kind.parts or (kind.name,)
    moved = sum(wire_bytes(part, 96.0, 6) for part in parts)
    assert moved == wire_bytes(kind.name, 96.0, 6)


def test_a_primitive_and_an_opcode_belong_to_one_kind() -> None:
    kinds = KINDS.values()
    assert len(OF_PRIMITIVE) == sum(len(kind.primitives) for kind in kinds)
    assert len(OF_OPCODE) == sum(1 + len(kind.opcodes) for kind in kinds)


def test_causes_read_as_sentences() -> None:
    for kind in KINDS.values():
        cause = kind.cause.format(by="dot_general", axes="data", where=" here")
        assert cause.startswith("dot_general")
        assert cause.endswith(" here")
