from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rhino_jax.utils.codec import OF_PROCESS, from_json, to_json


@dataclass(frozen=True)
class Part:
    seconds: float
    shape: tuple[int, ...] = ()
    pair: tuple[str, int] | None = None


@dataclass(frozen=True)
class Own:
    text: str

    def to_json(self) -> Any:
        return [self.text]

    @classmethod
    def from_json(cls, data: Any) -> Own:
        return cls(*data)


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    by_number: Mapping[int, frozenset[int]]
    own: Own
    anything: Any = None
    by_name: Mapping[str, Part | None] = field(default_factory=dict)
    by_place: Mapping[tuple[int, int], int] = field(default_factory=dict)
    devices: Any = field(default=None, compare=False, metadata=OF_PROCESS)


WHOLE = Whole(
    parts=(Part(math.inf, (2, 3), ("a", 1)), Part(-0.5)),
    by_number={4: frozenset({3, 1})},
    own=Own("x"),
    anything={"list": [1, None]},
    by_name={"none": None, "one": Part(1.0)},
    by_place={(3, 1): 4, (-1, 0): 5},
    devices=object(),
)


def test_records_come_back_from_plain_json() -> None:
    text = json.dumps(to_json(WHOLE), allow_nan=False)
    assert from_json(Whole, json.loads(text)) == WHOLE
    assert "devices" not in text and from_json(Whole, json.loads(text)).devices is None


def test_numbers_of_numpy_are_python_s() -> None:
    part = Part(np.float64(2), (np.int64(3),))  # type: ignore[arg-type]
    assert json.dumps(to_json(part)) == '{"seconds": 2.0, "shape": [3], "pair": null}'


def test_absent_keys_have_their_defaults_and_records_stay() -> None:
    part = Part(1.0)
    data = {"parts": [part, {"seconds": 1}], "by_number": {}, "own": ["x"]}
    assert from_json(Whole, data) == Whole((part, part), {}, Own("x"))


@pytest.mark.parametrize(
    "change",
    [
        {"parts": [{}]},
        {"parts": [{"seconds": "soon"}]},
        {"parts": [{"seconds": 1, "minutes": 2}]},
        {"parts": {"seconds": 1}},
        {"parts": [{"seconds": 1, "pair": ["a", 1, 2]}]},
        {"parts": [{"seconds": 1, "pair": [1, 1]}]},
        {"by_number": {"one": []}},
        {"by_place": {"3": 1, "3,x": 1}},
        {"devices": 1},
        {"parts": "text"},
    ],
)
def test_other_data_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_json(Whole, to_json(WHOLE) | change)
