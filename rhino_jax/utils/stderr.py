"""What compilers write to the process's standard error, past Python."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rhino_jax.errors import RhinoError


class Captured:
    """What was written while `captured_stderr` was open; empty until it is closed."""

    def __init__(self) -> None:
        self.text = ""


@contextlib.contextmanager
def captured_stderr() -> Iterator[Captured]:
    """Hold back what the process writes to file descriptor 2, from any thread.

    The caller decides what of it the user should see. If the body raises anything
    but a RhinoError, which tells its own story, all is passed on. What is written
    just before the process is killed is lost, unless `keep_captured` says where to.
    """
    captured = Captured()
    try:
        with _redirected(captured):
            yield captured
    except RhinoError:
        raise
    except BaseException:
        write_stderr(captured.text)
        raise


@contextlib.contextmanager
def _redirected(captured: Captured) -> Iterator[None]:
    _flush()
    with tempfile.TemporaryFile() if _kept is None else _kept.open("w+b") as file:
        real = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(real, 2)
            os.close(real)
            file.seek(0)
            captured.text = file.read().decode(errors="replace")


_kept: Path | None = None


def keep_captured(file: Path) -> None:
    """Hold back in a file that outlives the process, for those who wait for it.

    A compiler that meets a fatal error ends the process before anything is passed on.
    """
    global _kept
    _kept = file


def write_stderr(text: str) -> None:
    """Write past Python, as compilers do."""
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(2, data) :]


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()
