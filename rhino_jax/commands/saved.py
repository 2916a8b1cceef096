"""The commands `show` and `diff`, for saved plans.

The command `explore`: the page of a plan, in the browser.
"""

from __future__ import annotations

import argparse
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

import rhino_jax as rhino
from rhino_jax.commands.planning import (
    add_command,
    add_planning,
    add_showing,
    add_stages,
    plan_call,
    tell_plan,
)
from rhino_jax.explain.report.views.page import plan_page
from rhino_jax.utils.atomic_write import write_file


def add_explore(commands: Any) -> None:
    explore = add_command(
        commands,
        "explore",
        _run_explore,
        help="plan, and open the plan's page in the browser",
        description="Plan a function, or a model of the zoo, and open its page: the"
        " step by the clock, memory, layouts, the program; one file, no network.",
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
    show.set_defaults(run=_run_show)

    diff = commands.add_parser("diff", help="what changes from plan A to plan B")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    diff.set_defaults(run=_run_diff)


def _run_show(args: argparse.Namespace) -> None:
    tell_plan(rhino.load_plan(args.file), args)


def _run_diff(args: argparse.Namespace) -> None:
    print(rhino.load_plan(args.a).diff(rhino.load_plan(args.b)))
