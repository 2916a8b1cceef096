"""Parse and format quantities: bytes, seconds, counts and shares, in one place."""

from __future__ import annotations

import math
import re


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_FLOPS = ("", "k", "M", "G", "T", "P", "E")
_QUANTITY = re.compile(r"([+-]?[\d_,]*\.?\d*(?:e[+-]?\d+)?)\s*([a-zµ]*)", re.IGNORECASE)
_BYTES_OF = {"": 1.0, "b": 1.0, "byte": 1.0, "bytes": 1.0} | {
    f"{letter}{ending}": float(base**power)
    for power, letter in enumerate("kmgtp", 1)
    for base, endings in ((1000, ("b",)), (1024, ("ib", "i")))
    for ending in endings
}
_SECONDS_OF = {
    "": 1.0, "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0,
    "ms": 1e-3, "us": 1e-6, "µs": 1e-6,
    "min": 60.0, "minute": 60.0, "minutes": 60.0, "h": 3600.0, "hour": 3600.0,
    "hours": 3600.0,
}  # fmt: skip


def parse_bytes(text: str) -> float | None:
    """Return the bytes of `16GiB`, `1.5 GB` or `12e9`; None for other text.

    GB is 1000³ bytes and GiB 1024³, by SI and IEC. A bare `G` is refused: some mean the
    one, some the other.
    """
    return _parse(text, _BYTES_OF)


def parse_seconds(text: str) -> float | None:
    """Return the seconds of `5`, `300ms` or `2 min`; None for other text."""
    return _parse(text, _SECONDS_OF)


def _parse(text: str, units: dict[str, float]) -> float | None:
    found = _QUANTITY.fullmatch(text.strip())
    scale = units.get(found[2].lower()) if found else None
    if found is None or scale is None:
        return None
    try:
        return float(found[1].replace(",", "").replace("_", "")) * scale
    except ValueError:
        return None


def format_bytes(value_bytes: float) -> str:
    """Return bytes as `1.5 KiB` or `15.8 GiB`: binary units, three digits."""
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
    """Return a time as `12.3 ms`, `4.56 µs` or `1.2 s`: three significant digits."""
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
    """Return FLOPs as `3.21 TFLOP`: decimal units, three significant digits."""
    if not math.isfinite(flops):
        return _non_finite(flops)
    value = float(flops)
    for unit in _FLOPS:
        if value < 999.5 or unit == _FLOPS[-1]:
            return f"{_three_digits(value)} {unit}FLOP"
        value /= 1000
    raise AssertionError("unreachable: the last unit takes all")


def format_count(count: int) -> str:
    """Return a count as `12,345`."""
    return f"{count:,}"


def format_share(share: float) -> str:
    """Return a share as `97.3 %` for 0.973; below 1 it never rounds up to 100 %."""
    if not math.isfinite(share):
        return _non_finite(share)
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    percent = 100 * share
    return f"{percent:.0f} %" if percent == round(percent) else f"{percent:.1f} %"


def format_ratio(ratio: float) -> str:
    """Return a ratio as `1.25x`."""
    if not math.isfinite(ratio):
        return _non_finite(ratio)
    return f"{ratio:.2f}x" if ratio < 99.995 else f"{ratio:,.0f}x"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}" if value >= 9999.5 else f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _non_finite(value: float) -> str:
    return "?" if math.isnan(value) else "∞" if value > 0 else "-∞"
