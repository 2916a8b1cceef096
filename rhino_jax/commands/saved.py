"""The commands `show` and `diff`, for saved plans."""

from __future__ import annotations

import argparse
from typing import Any

import rhino_jax as rhino
from rhino_jax.commands.planning import add_showing, tell_plan


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
