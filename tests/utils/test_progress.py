from __future__ import annotations

import io
import sys
import threading
import time
import types

import pytest

from rhino_jax.utils.progress import Progress, is_interactive


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(stream=None, **options):
    stream, clock = stream or Terminal(), Clock()
    return Progress(stream=stream, clock=clock, **options), stream, clock


def shown(stream: io.StringIO) -> str:
    """What a terminal shows in the line at the end."""
    line = ""
    for part in stream.getvalue().split("\r"):
        line = part + line[len(part) :]
    return line.rstrip()


def test_the_line_tells_best_bound_gap_and_seconds() -> None:
    progress, stream, clock = make()
    clock.now_s = 4.2
    progress.update(12.3e-3, 11.9e-3)
    assert shown(stream) == "planning… best 12.3 ms, bound 11.9 ms, gap 3.3 %, 4 s"


def test_silent_for_two_seconds() -> None:
    progress, stream, clock = make()
    for clock.now_s in (0.0, 1.0, 1.99):
        progress.update(1.0, 0.5)
    assert stream.getvalue() == ""
    clock.now_s = 2.0
    progress.update()
    assert "best 1.00 s" in shown(stream)


def test_what_is_not_known_is_left_out_and_what_is_known_stays() -> None:
    progress, stream, clock = make()
    clock.now_s = 3
    progress.update(None, 1e-3)
    assert shown(stream) == "planning… bound 1.00 ms, 3 s"
    clock.now_s = 4
    progress.update(2e-3, None)
    assert shown(stream) == "planning… best 2.00 ms, bound 1.00 ms, gap 50 %, 4 s"


def test_no_bound_is_above_the_best() -> None:
    progress, stream, clock = make()
    clock.now_s = 3
    progress.update(2e-3, 1.9e-3)
    clock.now_s = 4
    progress.update(1.8e-3, None)
    assert shown(stream) == "planning… best 1.80 ms, 4 s"
    clock.now_s = 5
    progress.update(None, 1.85e-3)
    assert shown(stream) == "planning… best 1.80 ms, 5 s"


def test_a_shorter_line_wipes_the_longer_one() -> None:
    progress, stream, clock = make()
    clock.now_s = 3
    progress.update(123e-3, 122e-3)
    clock.now_s = 4
    progress.update(1.0, 1.0)
    assert shown(stream) == "planning… best 1.00 s, bound 1.00 s, gap 0 %, 4 s"


def test_close_wipes_the_line_and_ends_it() -> None:
    progress, stream, clock = make()
    clock.now_s = 3
    progress(1.0, 0.5)
    progress.close()
    assert shown(stream) == ""
    assert stream.getvalue().endswith("\r")
    size = len(stream.getvalue())
    progress.update(0.9, 0.6)
    progress.close()
    assert len(stream.getvalue()) == size


def test_close_without_a_line_writes_nothing() -> None:
    progress, stream, _ = make()
    progress.close()
    assert stream.getvalue() == ""


def test_writes_are_not_too_frequent() -> None:
    progress, stream, clock = make(interval_s=0.5)
    for i in range(100):
        clock.now_s = 2 + i / 100
        progress.update(1.0, 0.5)
    assert stream.getvalue().count("\r") == 2


def test_a_pipe_gets_a_line_every_ten_seconds() -> None:
    progress, stream, clock = make(io.StringIO())
    for i in range(0, 30):
        clock.now_s = float(i)
        progress.update(1.0, 0.5)
    progress.close()
    assert stream.getvalue().splitlines() == [
        f"planning… best 1.00 s, bound 500 ms, gap 50 %, {s} s" for s in (10, 20)
    ]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_silent_when_disabled(stream) -> None:
    progress, stream, clock = make(stream, is_enabled=False)
    clock.now_s = 100
    progress.update(1.0, 0.5)
    progress.close()
    assert stream.getvalue() == ""


def test_a_stream_that_breaks_does_not_break_the_search() -> None:
    progress, stream, clock = make()
    clock.now_s = 3
    stream.close()
    progress.update(1.0, 0.5)
    progress.close()


def test_a_context_closes_it() -> None:
    progress, stream, clock = make()
    with progress:
        clock.now_s = 3
        progress.update(1.0, 0.5)
    assert shown(stream) == ""


def test_a_notebook_is_interactive(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert not is_interactive(stream)
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert is_interactive(stream)
    assert not is_interactive(io.StringIO())


def test_a_thread_tells_the_seconds_of_one_long_call() -> None:
    stream = Terminal()
    line = Progress(doing="compiling `step`", stream=stream, delay_s=0, interval_s=0.01)
    with line.ticking():
        deadline = time.monotonic() + 20
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert shown(stream).startswith("compiling `step`… 0 s")
    assert shown(stream) == ""


def test_no_thread_is_started_for_a_disabled_line() -> None:
    before = threading.active_count()
    with Progress(is_enabled=False, stream=Terminal()).ticking():
        assert threading.active_count() == before
