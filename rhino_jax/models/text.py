"""Training text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def stdlib_bytes(limit_bytes: int = 4_000_000) -> np.ndarray:
    """Return the standard library's sources, one after the other, as uint8 [N].

    Files are read in the order of their names, the top level first, without installed
    packages and tests, until `limit_bytes` are reached.

    Raises:
      FileNotFoundError: there are no sources, as in some frozen installations.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not skipped.intersection(parts):
            found.append((len(parts), parts, path))
    chunks: list[bytes] = []
    size = 0
    for _, _, path in sorted(found):
        if size >= limit_bytes:
            break
        chunks.append(path.read_bytes())
        size += len(chunks[-1])
    if not size:
        raise FileNotFoundError(f"no Python sources under {root}")
    return np.frombuffer(b"".join(chunks)[:limit_bytes], np.uint8)


def batches(
    text: np.ndarray, batch: int, seq_len: int, *, seed: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Yield random windows of a text, without end.

    Args:
      text: uint8 [N], N > seq_len.
      batch, seq_len: windows in a batch, and bytes in a window.
      seed: the same seed gives the same batches.

    Returns:
      `tokens` and `labels`, int32 [batch, seq_len] each: a byte and the next one.

    Raises:
      ValueError: the text is shorter than a window.
    """
    if len(text) <= seq_len:
        raise ValueError(f"text of {len(text)} bytes, expected more than {seq_len}")
    return _windows(text, batch, seq_len, np.random.default_rng(seed))


def _windows(
    text: np.ndarray, batch: int, seq_len: int, rng: np.random.Generator
) -> Iterator[dict[str, np.ndarray]]:
    offsets = np.arange(seq_len + 1)
    while True:
        starts = rng.integers(0, len(text) - seq_len, batch)
        window = text[starts[:, None] + offsets].astype(np.int32)
        yield {"tokens": window[:, :-1], "labels": window[:, 1:]}
