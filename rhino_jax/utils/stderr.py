"""Capture the process's standard error, which compilers write to without Python."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TextIO

from rhino_jax.errors import RhinoError
from rhino_jax.utils.worker import KEPT_AT


class Captured:
    """Text that was written within `captured_stderr`; empty until that is closed."""

    def __init__(self) -> None:
        self.text = ""


@contextlib.contextmanager
def captured_stderr() -> Iterator[Captured]:
    """Capture what the process writes to file descriptor 2, from any thread.

    The caller decides what of it the user should see. If the body raises anything but a
    RhinoError, which is complete in itself, all of it is forwarded. Text written just
    before the process is killed is lost, unless `KEPT_AT` names a file for it.
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
    kept = os.environ.get(KEPT_AT)
    with open(kept, "w+b") if kept else tempfile.TemporaryFile() as file:
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


@contextlib.contextmanager
def real_stderr() -> Iterator[TextIO]:
    """Yield a stream to standard error that `captured_stderr` does not capture."""
    try:
        is_captured = sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):  # none, or a notebook's, a test's
        is_captured = False
    if not is_captured:
        yield sys.stderr
        return
    with os.fdopen(os.dup(2), "w") as stream:
        yield stream


def write_stderr(text: str) -> None:
    """Write to file descriptor 2, as compilers do."""
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(2, data) :]


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()
