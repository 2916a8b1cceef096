"""The commands `why` and `sweep`, `explore` (the page of a plan, in the browser), and
`show` and `diff` for saved plans.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rhino_jax as rhino
from rhino_jax.commands.planning import (
    add_command,
    add_planning,
    add_showing,
    add_stages,
    called,
    count_or_auto,
    plan_call,
    stages_of,
    tell_plan,
)
from rhino_jax.commands.words import (
    PINS_HELP,
    mesh_axes,
    positive_int,
    read_pins,
    size_bytes,
)
from rhino_jax.explain.report.views.page import plan_page
from rhino_jax.utils.atomic_write import write_file


def add_exploring(commands: Any) -> None:
    why = add_command(
        commands,
        "why",
        _run_why,
        help="explain why a value has its spec",
        description="Plan, then fix a value to each other layout and solve everything"
        " else again: the cost of each, and the constraints on it.",
    )
    why.add_argument(
        "key", help="a tree path, glob, source line, scope, op (#12) or value (%%34)"
    )
    add_planning(why)
    add_stages(why)
    why.add_argument("--full", action="store_true", help="show every layout")

    sweep = add_command(
        commands,
        "sweep",
        _run_sweep,
        help="compare a model's step time and cost on many machines",
        description="Estimate every combination of the listed options; lists have"
        " commas.",
    )
    sweep.add_argument("--hardware", type=_list(str), metavar="v5e,h100")
    sweep.add_argument("--devices", type=_list(positive_int), metavar="16,64")
    sweep.add_argument(
        "--mesh", type=mesh_axes, action="append", metavar="data=4,model=2",
        help="may be given several times",
    )  # fmt: skip
    sweep.add_argument("--memory-budget", type=_list(size_bytes), metavar="16GiB,…")
    sweep.add_argument("--batch", type=_list(positive_int), metavar="64,128")
    sweep.add_argument(
        "--stages", type=_list(_stages), metavar="1,2,4+2+2",
        help="numbers of stages, or 4+2+2: devices of each",
    )  # fmt: skip
    sweep.add_argument("--microbatches", type=_list(count_or_auto), metavar="1,4")
    sweep.add_argument(
        "--pins", action="append", default=[], metavar="PATH=SPEC", help=PINS_HELP
    )
    sweep.add_argument("--level", choices=("fast", "best"), default="fast")
    sweep.add_argument(
        "--csv", metavar="FILE", help="write every configuration to a file"
    )
    sweep.add_argument("--full", action="store_true", help="show every configuration")
    sweep.add_argument(
        "--workers", type=positive_int, metavar="N",
        help="processes that search (default: one for each core, if that saves time)",
    )  # fmt: skip
    sweep.add_argument("--no-progress", action="store_true")


def _list(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a reader of comma-separated values."""

    def read_all(text: str) -> list[Any]:
        return [read(part.strip()) for part in text.split(",")]

    return read_all


def _stages(text: str) -> int | str | list[int]:
    """Parse a number, "auto", or the devices of every stage, as 4+2+2."""
    return stages_of(text.replace("+", ","))


def _run_why(args: argparse.Namespace) -> None:
    print(plan_call(args).why(args.key).table(full=args.full))


def _run_sweep(args: argparse.Namespace) -> None:
    call = called(args)
    found = rhino.sweep(
        call.fn,
        *call.args,
        hardware=args.hardware,
        devices=args.devices,
        mesh=args.mesh,
        memory_budget_bytes=args.memory_budget,
        batch=args.batch,
        stages=args.stages,
        microbatches=args.microbatches,
        pins=read_pins(args.pins),
        level=args.level,
        progress=not args.no_progress,
        workers=args.workers,
        **call.options,
        **call.kwargs,
    )
    if args.csv:
        rows = found.to_dicts()
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_file("`--csv`", args.csv, text.getvalue())
        print(f"written to {args.csv}", file=sys.stderr)
    print(found.table(full=args.full))


def add_explore(commands: Any) -> None:
    explore = add_command(
        commands,
        "explore",
        _run_explore,
        help="plan, and open the plan's page in the browser",
        description="Plan a function, or a model of the zoo, and open its page: the"
        " step's timeline, memory, layouts, the program; one file, no network.",
    )
    add_planning(explore)
    add_stages(explore)
    explore.add_argument(
        "--html", metavar="FILE", help="where the page is written; default: a new file"
    )
    explore.add_argument("--no-open", action="store_true", help="only write the page")


def _run_explore(args: argparse.Namespace) -> None:
    plan = plan_call(args)
    file = args.html or f"{tempfile.mkdtemp(prefix='rhino_')}/{plan.program_name}.html"
    write_file("`explore`", file, plan_page(plan))
    print(plan)
    print(f"page written to {file}")
    if not args.no_open:
        webbrowser.open(Path(file).resolve().as_uri())


def add_saved(commands: Any) -> None:
    show = commands.add_parser("show", help="show a saved plan")
    show.add_argument("file")
    add_showing(show)
    show.set_defaults(run=lambda args: tell_plan(rhino.load_plan(args.file), args))

    diff = commands.add_parser("diff", help="show the differences of two saved plans")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    diff.set_defaults(
        run=lambda x: print(rhino.load_plan(x.a).diff(rhino.load_plan(x.b)))
    )
