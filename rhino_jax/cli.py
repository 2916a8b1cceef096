"""The command line: `python -m rhino_jax COMMAND`; `--help` lists the commands.

Its exit codes are in `EXIT_CODES`, which `--help` shows; errors are printed in four
parts on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rhino_jax.bench.versions import versions, versions_line
from rhino_jax.commands.benching import add_bench, add_measure
from rhino_jax.commands.checking import add_audit, add_verify
from rhino_jax.commands.exploring import add_explore, add_exploring, add_saved
from rhino_jax.commands.planning import add_plan
from rhino_jax.commands.words import (
    EXIT_CODES,
    positive,
    positive_int,
    shares,
    with_flags,
)
from rhino_jax.errors import InfeasiblePlanError, RhinoError
from rhino_jax.solver.problem import UnsatisfiedError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: the words after `python -m rhino_jax`; None: those of this process.
    Returns:
      The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        # Output contains × and µ; a terminal that lacks them shows '?'.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(
        prog="python -m rhino_jax",
        description="Plans how a JAX program is sharded.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show versions")
    commands = parser.add_subparsers(
        required=True,
        metavar="{demo,plan,explore,verify,audit,why,sweep,show,diff,bench,probe,fit,"
        "measure,solve}",
    )
    demo = commands.add_parser("demo", help="plan and train a small GPT on 8 devices")
    demo.add_argument("--steps", type=positive_int, help="default: 30; 3 in stages")
    demo.add_argument(
        "--stages", type=positive_int, help="a U-Net instead, in this number of stages"
    )
    demo.set_defaults(run=_run_demo)
    add_plan(commands)
    add_explore(commands)
    add_verify(commands)
    add_audit(commands)
    add_exploring(commands)
    add_saved(commands)
    add_bench(commands)
    add_measure(commands)
    _add_solve(commands)
    args = parser.parse_args(argv)
    try:
        run: Callable[[argparse.Namespace], int | None] = args.run
        code = run(args)
        sys.stdout.flush()
    except (InfeasiblePlanError, UnsatisfiedError) as error:
        return _fail(error, 1)
    except RhinoError as error:
        return _fail(error, 2)
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code or 0


def _fail(error: RhinoError, code: int) -> int:
    sys.stdout.flush()
    print(f"{type(error).__name__}: {with_flags(error)}", file=sys.stderr)
    return code


class _Version(argparse.Action):
    """Prints the versions that planning and compilation depend on, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        print(versions_line(versions()))
        parser.exit()


def _run_demo(args: argparse.Namespace) -> None:
    from rhino_jax.commands import demo

    if args.stages is None:
        demo.run(steps=args.steps or 30)
    else:
        demo.run_stages(stages=args.stages, steps=args.steps or 3)


def _add_solve(commands: Any) -> None:
    solve = commands.add_parser(
        "solve",
        help="solve an instance of the contest on intra-operator parallelism",
        description="Solve an instance of the ASPLOS/EuroSys 2025 contest on"
        " intra-operator parallelism: one strategy per node, least cost, memory within"
        " its limit at every time. An independent checker recomputes what is printed.",
        epilog=EXIT_CODES,
    )
    solve.add_argument("file", metavar="FILE.json[.gz]")
    solve.add_argument(
        "--time-limit-s", type=positive, default=60.0, help="time limit in seconds"
    )
    solve.add_argument("--output", metavar="FILE", help="write the choices as JSON")
    solve.add_argument("--workers", type=positive_int, help="threads of CP-SAT")
    solve.add_argument("--seed", type=int, default=0)
    solve.add_argument(
        "--limit-share",
        metavar="0.95[,0.92,…]",
        type=shares,
        default=[1.0],
        help="share of the file's memory limit that choices may use; several make a"
        " table of gaps, each with the time limit",
    )
    solve.add_argument("--no-progress", action="store_true")
    solve.set_defaults(run=_run_solve)


def _run_solve(args: argparse.Namespace) -> None:
    from rhino_jax.contest.command import run_solve

    run_solve(
        args.file,
        time_limit_s=args.time_limit_s,
        output=args.output,
        workers=args.workers,
        seed=args.seed,
        shows_progress=not args.no_progress,
        limit_shares=args.limit_share,
    )
