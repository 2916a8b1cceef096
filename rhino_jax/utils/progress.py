"""One updating line while planning or compiling takes longer than two seconds.

planning… best 12.3 ms, bound 11.9 ms, gap 3.3 %, 4 s
compiling `train_step`… 12 s

If output is piped, a separate line every ten seconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rhino_jax.units import format_seconds, format_share


class Progress:
    """Progress line of a long operation, in a terminal or notebook, or lines in a pipe.

    The solver may call `update` from threads of its own. No exception is raised into
    the search: a closed stream is not written to again.

    Args:
      doing: what takes the time, as the line begins.
      is_enabled: False: write nothing.
      stream: where to write; None: standard error.
      clock: monotonic clock, in seconds.
      delay_s: seconds before the first write, so that quick plans show nothing.
      interval_s: minimum seconds between two writes.
      piped_s: replaces both if the stream is not interactive.
    """

    def __init__(
        self,
        *,
        doing: str = "planning",
        is_enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        delay_s: float = 2.0,
        interval_s: float = 0.1,
        piped_s: float = 10.0,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._doing, self._is_shown = doing, is_enabled
        self._is_piped = not is_interactive(self._stream)
        self._clock = clock
        self._delay_s = piped_s if self._is_piped else delay_s
        self._interval_s = piped_s if self._is_piped else interval_s
        self._start_s = clock()
        self._written_s = float("-inf")
        self._width = 0
        self._best_s: float | None = None
        self._bound_s: float | None = None
        self._lock = threading.Lock()

    def update(self, best_s: float | None = None, bound_s: float | None = None) -> None:
        """Report what is known so far.

        Args:
          best_s: objective of the best plan found, in seconds; None: unchanged.
          bound_s: proved lower bound, in seconds; None: unchanged.
        """
        with self._lock:
            self._best_s = self._best_s if best_s is None else best_s
            self._bound_s = self._bound_s if bound_s is None else bound_s
            best_s, bound_s = self._best_s, self._bound_s
            if best_s is not None and bound_s is not None and best_s < bound_s:
                self._bound_s = None  # Of a mesh that another one has beaten.
            now_s = self._clock()
            if (
                self._is_shown
                and now_s - self._start_s >= self._delay_s
                and now_s - self._written_s >= self._interval_s
            ):
                self._written_s = now_s
                self._write(self._line(now_s - self._start_s))

    __call__ = update

    def close(self) -> None:
        """Clear the line; later updates write nothing."""
        with self._lock:
            if self._width:
                self._write("")
                self._width = 0
            self._is_shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Update the line from a thread while the body runs; close it at the end."""
        if not self._is_shown:
            yield
            return
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(min(self._interval_s, 0.5)):
                self.update()

        thread = threading.Thread(target=tick, name="rhino progress", daemon=True)
        with self:
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()

    def _line(self, elapsed_s: float) -> str:
        parts = []
        if self._best_s is not None:
            parts.append(f"best {format_seconds(self._best_s)}")
        if self._bound_s is not None:
            parts.append(f"bound {format_seconds(self._bound_s)}")
        if self._best_s and self._bound_s is not None:
            gap = max(0.0, self._best_s - self._bound_s) / self._best_s
            parts.append(f"gap {format_share(gap)}")
        parts.append(f"{elapsed_s:.0f} s")
        return f"{self._doing}… " + ", ".join(parts)

    def _write(self, line: str) -> None:
        padding = " " * max(0, self._width - len(line))
        text = f"\r{line}{padding}" + ("" if line else "\r")
        try:
            self._stream.write(f"{line}\n" if self._is_piped else text)
            self._stream.flush()
        except (OSError, ValueError):
            self._is_shown = False
        self._width = 0 if self._is_piped else len(line)


def is_interactive(stream: TextIO) -> bool:
    """Whether a stream is a terminal, or standard error of a notebook's kernel."""
    try:
        if stream.isatty():
            return True
    except (AttributeError, ValueError):
        return False
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None and stream is sys.stderr


@contextlib.contextmanager
def shown(
    wanted: bool | Callable[[float | None, float | None], None],
) -> Iterator[Callable[[float | None, float | None], None]]:
    """Yield the callback for progress: the user's own, or that of a progress line.

    Args:
      wanted: a function of best and bound in seconds; or whether to show a line.
    """
    if callable(wanted):
        yield wanted
        return
    with Progress(is_enabled=bool(wanted)) as line:
        yield line.update
