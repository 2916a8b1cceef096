"""The numbers of the search, of prices and of compilers, one record each."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import rhino_jax
from rhino_jax.hardware.lowering import Observed
from rhino_jax.model.constants import ModelConstants
from rhino_jax.planner.search.records import SearchLimits
from rhino_jax.solver import parameters


ROOT = Path(rhino_jax.__file__).parent

MARKERS = frozenset({-1, 1})
"""Positions, and what stands for none."""


ENGINE = [
    type(record)
    for record in vars(parameters).values()
    if dataclasses.is_dataclass(record) and not isinstance(record, type)
]


@pytest.mark.parametrize("record", [SearchLimits, Observed, ModelConstants, *ENGINE])
def test_every_number_is_explained(record: type) -> None:
    text = record.__doc__ or ""
    for field in dataclasses.fields(record):
        _, found, sentence = text.partition(f"{field.name}: ")
        assert found, field.name
        assert len(sentence.split()) > 5


@pytest.mark.parametrize(
    "package", ["analysis", "cost", "model", "recipes", "planner/search"]
)
def test_no_file_has_numbers_of_its_own(package: str) -> None:
    """Named at the top of a file, where nobody else finds them."""
    found = []
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value not in MARKERS:
                found.append(f"{file.name}:{node.lineno}")
    assert found == []
