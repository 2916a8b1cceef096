"""Results written into a checkout, none of which is part of a wheel.

`rhino_jax/bench/RESULTS.md` has every table, and the README a few lines of each suite.
"""

from __future__ import annotations

from pathlib import Path

from rhino_jax.bench.checks import BenchError


RESULTS = "rhino_jax/bench/RESULTS.md"
"""Path of the results, relative to the folder of the README."""


def marks_of(suite: str) -> tuple[str, str]:
    """Return the lines that enclose a suite's section."""
    return f"<!-- bench:{suite} -->", f"<!-- /bench:{suite} -->"


def write_results(
    readme: str | Path, suite: str, text: str, summary: str, plot: str = ""
) -> str:
    """Write a suite's results, and its lines of the README.

    Args:
      readme: README of a checkout.
      suite: name of the suite.
      text: text for the suite's section of `RESULTS`, which is added if it is missing.
      summary: text for the README, if that has a section for the suite.
      plot: SVG that the text links to, written beside `RESULTS`; empty: none.

    Returns:
      Names of the written files, in words.

    Raises:
      BenchError: a file cannot be read or written, or its marks do not match.
    """
    written = _written(Path(readme), suite, text, summary)
    if plot:
        written[(Path(readme).parent / RESULTS).with_name(f"{suite}.svg")] = plot
    for file, new in written.items():
        try:
            file.write_text(new, encoding="utf-8")
        except OSError as error:
            raise _cannot(file, suite, error) from None
    return " and ".join(map(str, written))


def check_places(readme: str | Path, suite: str) -> None:
    """Check that `write_results` will find its sections, before hours of work.

    Raises:
      BenchError: as `write_results`.
    """
    _written(Path(readme), suite, "", "")


def _written(readme: Path, suite: str, text: str, summary: str) -> dict[Path, str]:
    """Return the files with their new content."""
    results = readme.parent / RESULTS
    start, end = marks_of(suite)
    old, document = _read(results, suite), _read(readme, suite)
    if start not in old and end not in old:
        old = f"{old.rstrip()}\n\n## `{suite}`\n\n{start}\n{end}\n"
    found = {results: with_section(old, suite, text, str(results))}
    if start in document or end in document:
        found[readme] = with_section(document, suite, summary, str(readme), gap="\n")
    return found


def _read(file: Path, suite: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _cannot(file, suite, error) from None


def _cannot(file: Path, suite: str, error: Exception) -> BenchError:
    return BenchError(
        f"`bench {suite} --readme`: {getattr(error, 'strerror', None) or error}.",
        where=str(file),
        fix=f"give the README of a checkout: {RESULTS} beside it is written too.",
    )


def with_section(
    old: str, suite: str, text: str, file: str, *, gap: str = "\n\n"
) -> str:
    """Return the document with the text between a suite's marks replaced.

    Args:
      old: the document.
      suite: name of the suite.
      text: the new text.
      file: name of the document, for errors.
      gap: text between marks and section.

    Raises:
      BenchError: it does not have exactly one pair of marks, in order.
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
    return f"{before}{start}{gap}{text.strip()}{gap}{end}{rest.split(end)[1]}"
