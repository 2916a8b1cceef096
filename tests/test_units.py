from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from rhino_jax.units import (
    format_bytes,
    format_flops,
    format_ratio,
    format_seconds,
    format_share,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1023.7 * 1024, "1.00 MiB"),
        (15.75 * 2**30, "15.8 GiB"),
        (2**60, "1024 PiB"),
        (1023.2 * 1024, "1023 KiB"),
        (2**70, "1,048,576 PiB"),
        (-2048, "-2.00 KiB"),
        (math.inf, "∞"),
        (math.nan, "?"),
    ],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0, "0 s"),
        (1e-12, "< 1 ns"),
        (2.5e-9, "2.50 ns"),
        (4.56e-6, "4.56 µs"),
        (999.7e-6, "1.00 ms"),
        (12.34e-3, "12.3 ms"),
        (99.96e-3, "100 ms"),
        (3.0, "3.00 s"),
        (4321, "4321 s"),
        (-0.5, "-500 ms"),
        (math.inf, "∞"),
    ],
)
def test_seconds(value_s: float, text: str) -> None:
    assert format_seconds(value_s) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.5, "50 %"),
        (0.973, "97.3 %"),
        (0.99999, "> 99.9 %"),
        (1e-9, "< 0.1 %"),
        (math.inf, "∞"),
    ],
)
def test_share(share: float, text: str) -> None:
    assert format_share(share) == text


def test_flops_and_ratio() -> None:
    assert format_flops(0) == "0.00 FLOP"
    assert format_flops(1.5e12) == "1.50 TFLOP"
    assert format_flops(999.9e9) == "1.00 TFLOP"
    assert format_ratio(1.254) == "1.25x"
    assert format_ratio(1234.5) in ("1,234x", "1,235x")


_SCALE = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@given(st.integers(1, 2**60))
def test_bytes_keep_three_digits(value: int) -> None:
    number, unit = format_bytes(value).split(" ")
    assert float(number.replace(",", "")) * _SCALE[unit] == pytest.approx(
        value, rel=6e-3
    )


@given(st.floats(1e-9, 1e6))
def test_seconds_keep_three_digits(value_s: float) -> None:
    number, unit = format_seconds(value_s).split(" ")
    scale = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(value_s, rel=6e-3)
