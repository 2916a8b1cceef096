"""The commands `bench`, `probe`, `fit` and `measure`, of programs and devices."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax

from rhino_jax.bench.measure import hardware_file, measure
from rhino_jax.commands.words import positive, positive_int
from rhino_jax.utils.atomic_write import check_folder, write_file


def add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="compile recipes and rhino's plans, and compare",
        description="Compile recipes and rhino's plans for hardware that need not be"
        " present, and compare the compiled programs. A run that was stopped goes on"
        " where it was.",
    )
    bench.add_argument("suite", nargs="?", help="as quick, or a TOML file")
    bench.add_argument(
        "--list",
        action="store_true",
        dest="is_list",
        help="list suites, or the rows of one",
    )
    bench.add_argument("--only", metavar="GLOB", default="", help="workloads to run")
    bench.add_argument("--methods", type=_names, metavar="fsdp,best", default=())
    bench.add_argument(
        "--timeout-s", type=positive, help="time limit of compiling one plan"
    )
    bench.add_argument("--jobs", type=positive_int, help="rows that run at once")
    bench.add_argument("--out", metavar="FOLDER", default="rhino_bench")
    bench.add_argument(
        "--fresh", action="store_true", dest="is_fresh", help="forget earlier results"
    )
    bench.add_argument(
        "--require-extras",
        action="store_true",
        dest="requires_extras",
        help="fail where the compiler of a target is not installed",
    )
    bench.add_argument(
        "--readme",
        metavar="FILE",
        nargs="?",
        const="README.md",
        help="of a checkout: its rhino_jax/bench/RESULTS.md is written, and a few lines"
        " here, both between the suite's marks",
    )
    bench.add_argument(
        "--against",
        metavar="FILE",
        help="SUITE.json of an earlier run: how compiled steps have changed",
    )
    bench.set_defaults(run=_run_bench)

    probe = commands.add_parser(
        "probe",
        help="compile small programs of all ops, and compare with predictions",
        description="Plan and compile small programs of every family of ops for"
        " hardware that need not be present, and list those whose step time is worst"
        " predicted. Compiled programs are kept for the next run.",
    )
    probe.add_argument("hardware", metavar="v5e:4x4", help="with its topology")
    probe.add_argument(
        "--only", metavar="GLOB", default="", help="FAMILY/PROGRAM/VARIATION"
    )
    probe.add_argument(
        "--count", type=positive_int, metavar="N", help="of programs; default: all"
    )
    probe.add_argument("--worst", type=positive_int, metavar="N", default=30)
    probe.add_argument("--out", metavar="FOLDER", default="rhino_bench")
    probe.add_argument(
        "--against", metavar="FILE", help="probe-….json of an earlier run: what changed"
    )
    probe.set_defaults(run=_run_probe)

    fit = commands.add_parser(
        "fit",
        help="fit a target's efficiencies to a benchmark's compiled programs",
        description="Fit the efficiencies and the overlap of hardware to the compiled"
        " programs of a benchmark.",
    )
    fit.add_argument("results", metavar="rhino_bench/full.json")
    fit.add_argument(
        "--write",
        action="store_true",
        help="write them to configs/hardware, with the error",
    )
    fit.set_defaults(run=_run_fit)


def add_measure(commands: Any) -> None:
    measure = commands.add_parser(
        "measure",
        help="measure the rates of the present devices",
        description="Measure the rates of the present devices, as a hardware file:"
        " --hardware my.toml, or hardware='my.toml', plans with it.",
    )
    measure.add_argument(
        "--emulate", type=positive_int, metavar="N", help="N devices on the CPU"
    )
    measure.add_argument("--write", metavar="FILE.toml", help="where to write the file")
    measure.set_defaults(run=_run_measure)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _run_bench(args: argparse.Namespace) -> int:
    from rhino_jax.bench.command import Command, run_command

    options = {f.name: getattr(args, f.name) for f in fields(Command)}
    return run_command(Command(**options))


def _run_probe(args: argparse.Namespace) -> int:
    from rhino_jax.bench.probe.command import ProbeCommand, run_probe

    options = {f.name: getattr(args, f.name) for f in fields(ProbeCommand)}
    return run_probe(ProbeCommand(**options))


def _run_fit(args: argparse.Namespace) -> None:
    from rhino_jax.bench.fit import fit_results, to_text, write_fit
    from rhino_jax.bench.store import read_results

    fits = fit_results(read_results(args.results, "`fit`"))
    print(to_text(fits) or "No kind of hardware has three programs.")
    if args.write:
        for fit in fits:
            print(f"written to {write_fit(fit)}")


def _run_measure(args: argparse.Namespace) -> None:
    from rhino_jax.commands.demo import emulate

    if args.emulate is not None:
        emulate(args.emulate, "measure")
    path = None if args.write is None else Path(args.write)
    if path is not None:
        # Check the folder before measuring, which takes a minute.
        check_folder("`--write`", path)
    devices = jax.devices()
    name = "measured" if path is None else path.stem
    text = hardware_file(measure(devices), devices, name)
    if path is None:
        print(text)
        return
    write_file("`--write`", path, text + "\n")
    print(f"written to {path}; plan with --hardware {path}", file=sys.stderr)
