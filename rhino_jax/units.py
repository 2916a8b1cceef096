"""How quantities are written: bytes, seconds, counts and shares, in one place."""

from __future__ import annotations

import math


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_FLOPS = ("", "k", "M", "G", "T", "P", "E")


def format_bytes(value_bytes: float) -> str:
    """`1.5 KiB`, `15.8 GiB`: binary units, three significant digits."""
    if not math.isfinite(value_bytes):
        return _non_finite(value_bytes)
    if value_bytes < 0:
        return "-" + format_bytes(-value_bytes)
    if round(value_bytes) < 1024:
        return f"{round(value_bytes)} B"
    value = float(value_bytes)
    for unit in _BINARY:
        # 1023.7 would print as 1024: take the next unit.
        if value < 1023.5 or unit == _BINARY[-1]:
            return f"{_three_digits(value)} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the last unit takes all")


def format_seconds(value_s: float) -> str:
    """`12.3 ms`, `4.56 µs`, `1.2 s`: three significant digits."""
    if not math.isfinite(value_s):
        return _non_finite(value_s)
    if value_s < 0:
        return "-" + format_seconds(-value_s)
    if value_s == 0:
        return "0 s"
    for scale, unit in _SECONDS:
        # 999.7 µs would print as 1000 µs: three digits round it up to 1.00 ms.
        if value_s >= 0.9995 * scale:
            return f"{_three_digits(value_s / scale)} {unit}"
    return "< 1 ns"


def format_flops(flops: float) -> str:
    """`3.21 TFLOP`: decimal units, three significant digits."""
    if not math.isfinite(flops):
        return _non_finite(flops)
    value = float(flops)
    for unit in _FLOPS:
        if value < 999.5 or unit == _FLOPS[-1]:
            return f"{_three_digits(value)} {unit}FLOP"
        value /= 1000
    raise AssertionError("unreachable: the last unit takes all")


def format_count(count: int) -> str:
    """`12,345`."""
    return f"{count:,}"


def format_share(share: float) -> str:
    """`97.3 %` of 0.973; never rounds what is not all up to 100 %."""
    if not math.isfinite(share):
        return _non_finite(share)
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    percent = 100 * share
    return f"{percent:.0f} %" if percent == round(percent) else f"{percent:.1f} %"


def format_ratio(ratio: float) -> str:
    """`1.25x`."""
    if not math.isfinite(ratio):
        return _non_finite(ratio)
    return f"{ratio:.2f}x" if ratio < 99.995 else f"{ratio:,.0f}x"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}" if value >= 9999.5 else f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _non_finite(value: float) -> str:
    return "?" if math.isnan(value) else "∞" if value > 0 else "-∞"
