"""The command `python -m rhino_jax probe`."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.command import missing_extra, say
from rhino_jax.bench.probe.report import report
from rhino_jax.bench.probe.run import Probe, probe
from rhino_jax.bench.store import Store, read_earlier, write_json
from rhino_jax.bench.versions import versions
from rhino_jax.hardware.files import load_target


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCommand:
    """Options of the command line.

    Attributes:
      hardware: what to compile for, with its topology, as "v5e:4x4".
      only: glob of FAMILY/PROGRAM/VARIATION; empty: all programs.
      count: number of programs; None: all.
      worst: number of programs in the table.
      out: folder of compiled programs and results.
      against: results of an earlier run to compare with; None: no comparison.
    """

    hardware: str
    only: str = ""
    count: int | None = None
    worst: int = 30
    out: str = "rhino_bench"
    against: str | None = None


def run_probe(command: ProbeCommand) -> int:
    """Probe a compiler.

    Returns:
      1 if a program did not compile; else 0.
    Raises:
      BenchError: the compiler is not installed, or nothing is chosen.
    """
    target, what = load_target(command.hardware), f"`probe {command.hardware}`"
    if target.num_devices is None:
        raise BenchError(
            f"{what}: the number of devices is not given.",
            where=command.hardware,
            fix="give the topology too: v5e:4x4, h100:8.",
        )
    if (missing := missing_extra(command.hardware)) is not None:
        raise BenchError(f"{what}: {missing}", fix="then run it again.")
    before = None
    if command.against is not None:
        fix = "give rhino_bench/probe-….json of an earlier run, copied"
        known = read_earlier(
            command.against, "probes", tuple[Probe, ...], what, "`probe`", fix
        )
        before = {p.name: p for p in known}
    store = Store.open(command.out)
    folder = store.folder / "compiled"
    found: list[Probe] = []
    name = f"probe-{command.hardware.replace(':', '_')}"
    file = store.folder / f"{name}.json"
    try:
        for done in probe(command.hardware, command.only, command.count, folder, say):
            found.append(done)
    finally:
        write_json(file, {"versions": versions(), "probes": found})
    text = report(found, before, command.worst)
    print(text)
    (store.folder / f"{name}.md").write_text(text, encoding="utf-8")
    say(f"written to {file}")
    return 1 if any(p.error for p in found) else 0
