"""The section of a README that the benchmark writes."""

from __future__ import annotations

from pathlib import Path

from rhino_jax.bench.errors import BenchError


def marks_of(suite: str) -> tuple[str, str]:
    """The lines between which a suite's section lies."""
    return f"<!-- bench:{suite} -->", f"<!-- /bench:{suite} -->"


def write_section(path: str | Path, suite: str, text: str) -> None:
    """Replace what lies between a suite's marks.

    Raises:
      BenchError: the file cannot be read or written, or has no such marks.
    """
    start, end = marks_of(suite)
    file = Path(path)
    try:
        old = file.read_text(encoding="utf-8")
        file.write_text(with_section(old, suite, text, str(path)), encoding="utf-8")
    except OSError as error:
        raise BenchError(
            f"`bench {suite} --readme`: {error.strerror}.",
            where=str(path),
            fix=f"give a file that holds the lines {start} and {end}.",
        ) from None


def with_section(old: str, suite: str, text: str, file: str) -> str:
    """The document with another text between a suite's marks.

    Raises:
      BenchError: it has not exactly one pair of marks, in order.
    """
    start, end = marks_of(suite)
    if (
        old.count(start) != 1
        or old.count(end) != 1
        or old.index(start) > old.index(end)
    ):
        raise BenchError(
            f"`bench {suite} --readme`: the file has no place for the section.",
            where=file,
            numbers=f"{old.count(start)} lines {start}, {old.count(end)} lines {end}",
            fix=f"write one line {start} and below it one line {end}.",
        )
    before, rest = old.split(start)
    return f"{before}{start}\n\n{text.strip()}\n\n{end}{rest.split(end)[1]}"
