"""The command line: `python -m rhino_jax COMMAND`; `--help` lists the commands.

Its exit codes are in `EXIT_CODES`, which `--help` shows; errors are told in four parts
on standard error.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rhino_jax.errors import InfeasiblePlanError, MeshError, RhinoError
from rhino_jax.solver.errors import UnsatisfiedError


if TYPE_CHECKING:
    from rhino_jax.plan.plan import Plan


EXIT_CODES = (
    "exit codes: 0 done; 1 nothing satisfies what is asked (of `solve`: or nothing that"
    " does was found in time), or cells of a benchmark failed; 2 bad input"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: the words after `python -m rhino_jax`; those of this process if None.
    Returns:
      The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        # Text here holds × and µ; a terminal that has neither shows '?'.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    args = _parser().parse_args(argv)
    try:
        run: Callable[[argparse.Namespace], int | None] = args.run
        code = run(args)
        sys.stdout.flush()
    except (InfeasiblePlanError, UnsatisfiedError) as error:
        return _fail(error, 1)
    except RhinoError as error:
        return _fail(error, 2)
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code or 0


def _fail(error: RhinoError, code: int) -> int:
    sys.stdout.flush()
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rhino_jax",
        description="Plans how a JAX program is sharded.",
        epilog=EXIT_CODES,
    )
    commands = parser.add_subparsers(
        required=True, metavar="{demo,plan,show,diff,bench,fit,measure,solve}"
    )

    demo = commands.add_parser("demo", help="plan and train a small GPT on 8 devices")
    demo.add_argument("--steps", type=_positive_int, default=30)
    demo.set_defaults(run=_demo)

    plan = commands.add_parser(
        "plan",
        help="plan a function or a model of the zoo",
        description="Plan a function, or a model of the zoo, from shapes alone.",
        epilog=EXIT_CODES,
    )
    plan.add_argument(
        "target", help="`module:function` (with --shapes), or a model, as gpt-7b"
    )
    plan.add_argument("--shapes", metavar="FILE.toml", help="abstract arguments")
    plan.add_argument("--mesh", type=_mesh, metavar="data=4,model=2")
    plan.add_argument(
        "--devices",
        type=_positive_int,
        metavar="N",
        help="let rhino choose a mesh of this many devices",
    )
    plan.add_argument("--hardware", help="as v5e, h100:8x8, or a TOML file")
    plan.add_argument("--budget-gib", type=_positive, help="memory of one device")
    plan.add_argument("--level", choices=("fast", "best"), default="best")
    plan.add_argument("--time-limit-s", type=_positive)
    plan.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    plan.add_argument("--html", metavar="FILE", help="write the plan as a page")
    plan.add_argument("--full", action="store_true", help="leave nothing out")
    plan.add_argument("--no-progress", action="store_true")
    plan.set_defaults(run=_plan)

    show = commands.add_parser("show", help="show a saved plan")
    show.add_argument("file")
    show.add_argument("--full", action="store_true", help="leave nothing out")
    show.add_argument("--html", metavar="FILE", help="write the plan as a page")
    show.set_defaults(run=_show)

    diff = commands.add_parser("diff", help="what changes from plan A to plan B")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    diff.set_defaults(run=_diff)

    bench = commands.add_parser(
        "bench",
        help="compile recipes and rhino's plans, and compare",
        description="Compile recipes and rhino's plans for hardware that is not there,"
        " and compare what the compiler made of them. Stopped and started again, it"
        " goes on where it was.",
    )
    bench.add_argument("suite", nargs="?", help="as quick, or a TOML file")
    bench.add_argument("--list", action="store_true", help="suites, or its cells")
    bench.add_argument("--only", metavar="GLOB", default="", help="workloads to run")
    bench.add_argument("--methods", metavar="fsdp,best", default="")
    bench.add_argument("--timeout-s", type=_positive, help="of one plan's compiling")
    bench.add_argument("--jobs", type=_positive_int, help="rows at a time")
    bench.add_argument("--out", metavar="FOLDER", default="rhino_bench")
    bench.add_argument("--fresh", action="store_true", help="forget earlier results")
    bench.add_argument(
        "--require-extras",
        action="store_true",
        help="fail where what compiles for a target is not installed",
    )
    bench.add_argument(
        "--readme",
        metavar="FILE",
        nargs="?",
        const="README.md",
        help="write the tables between the suite's marks in this file",
    )
    bench.add_argument(
        "--against",
        metavar="FILE",
        help="SUITE.json of an earlier run: how compiled steps have changed",
    )
    bench.set_defaults(run=_bench)

    fit = commands.add_parser(
        "fit",
        help="fit a target's efficiencies to what a benchmark compiled",
        description="Fit the efficiencies and the overlap of hardware to the compiled"
        " programs of a benchmark.",
    )
    fit.add_argument("results", metavar="rhino_bench/full.json")
    fit.add_argument(
        "--write", action="store_true", help="into configs/hardware, with the error"
    )
    fit.set_defaults(run=_fit)

    measure = commands.add_parser(
        "measure",
        help="measure the devices that are here",
        description="Measure the rates of the devices that are here, as lines of a"
        " hardware file.",
    )
    measure.add_argument(
        "--emulate", type=_positive_int, metavar="N", help="N devices on the CPU"
    )
    measure.set_defaults(run=_measure)

    solve = commands.add_parser(
        "solve",
        help="solve an instance of the contest on intra-operator parallelism",
        description="Solve an instance of the ASPLOS/EuroSys 2025 contest on"
        " intra-operator parallelism: one strategy per node, least cost, memory within"
        " its limit at every time. An independent checker recomputes what is printed.",
        epilog=EXIT_CODES,
    )
    solve.add_argument("file", metavar="FILE.json[.gz]")
    solve.add_argument("--time-limit-s", type=_positive, default=60.0, help="in all")
    solve.add_argument("--output", metavar="FILE", help="write the choices as JSON")
    solve.add_argument("--workers", type=_positive_int, help="of CP-SAT")
    solve.add_argument("--seed", type=int, default=0)
    solve.add_argument("--no-progress", action="store_true")
    solve.set_defaults(run=_solve)
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _mesh(text: str) -> dict[str, int]:
    """`data=4,model=2` as a mapping."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (x.strip() for x in part.partition("="))
        if not (name and equals and size.isdecimal() and int(size) > 0):
            raise argparse.ArgumentTypeError(
                f"{part!r} is no mesh axis; write name=size, as data=4,model=2"
            )
        if name in mesh:
            raise argparse.ArgumentTypeError(f"axis {name!r} is given twice")
        mesh[name] = int(size)
    return mesh


def _demo(args: argparse.Namespace) -> None:
    from rhino_jax.demo import run

    run(steps=args.steps)


def _plan(args: argparse.Namespace) -> None:
    import rhino_jax as rhino
    from rhino_jax.loading import load_call, tracing_error

    mesh, hardware = _place(args)
    call = load_call(args.target, args.shapes)
    sharded = rhino.auto_shard(
        call.fn,
        mesh=mesh,
        hardware=hardware,
        memory_budget_bytes=args.budget_gib and round(args.budget_gib * 2**30),
        level=args.level,
        time_limit_s=args.time_limit_s,
        progress=not args.no_progress,
        **call.options,
    )
    try:
        plan = sharded.plan(*call.args, **call.kwargs)
    except RhinoError:
        raise
    except Exception as error:
        # Tracing marks what the user's function raises; all else is a fault of ours,
        # and deserves its traceback.
        if not hasattr(error, "__notes__"):
            raise
        raise tracing_error(args.target, error) from error
    if args.save:
        _writing(args.save, lambda: plan.save(args.save))
        print(f"saved to {args.save}", file=sys.stderr)
    _tell(plan, args)


def _show(args: argparse.Namespace) -> None:
    from rhino_jax.plan.store import load_plan

    _tell(load_plan(args.file), args)


def _diff(args: argparse.Namespace) -> None:
    from rhino_jax.plan.diff import diff
    from rhino_jax.plan.store import load_plan

    print(diff(load_plan(args.a), load_plan(args.b)))


def _bench(args: argparse.Namespace) -> int:
    from rhino_jax.bench.command import Command, run_command

    return run_command(
        Command(
            suite=args.suite,
            is_list=args.list,
            only=args.only,
            methods=tuple(filter(None, args.methods.split(","))),
            timeout_s=args.timeout_s,
            jobs=args.jobs,
            out=args.out,
            is_fresh=args.fresh,
            requires_extras=args.require_extras,
            readme=args.readme,
            against=args.against,
        )
    )


def _fit(args: argparse.Namespace) -> None:
    from rhino_jax.bench.fit import fit_results, to_text, write_fit
    from rhino_jax.bench.store import read_results

    fits = fit_results(read_results(args.results, "`fit`"))
    print(to_text(fits) or "No kind of hardware has three programs.")
    if args.write:
        for fit in fits:
            print(f"written to {write_fit(fit)}")


def _measure(args: argparse.Namespace) -> None:
    import jax

    from rhino_jax.bench.measure import measure
    from rhino_jax.demo import emulate

    if args.emulate is not None:
        emulate(args.emulate, "measure")
    print(measure(jax.devices()).to_text())


def _solve(args: argparse.Namespace) -> None:
    from rhino_jax.solver.command import run_solve

    run_solve(
        args.file,
        time_limit_s=args.time_limit_s,
        output=args.output,
        workers=args.workers,
        seed=args.seed,
        shows_progress=not args.no_progress,
    )


def _tell(plan: Plan, args: argparse.Namespace) -> None:
    """Write the page, if one is asked for, and print the table."""
    from rhino_jax.report.html import page, to_html

    if args.html:
        text = page(to_html(plan), title=f"plan of {plan.program_name}")
        _writing(args.html, lambda: Path(args.html).write_text(text, encoding="utf-8"))
        print(f"page written to {args.html}", file=sys.stderr)
    print(plan.table(full=args.full))


def _writing(path: str, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise RhinoError(
            f"cannot write {path!r}: {error.strerror or error}.",
            where=str(Path(path).resolve().parent),
            fix="give a path in a folder that exists and can be written.",
        ) from None


def _place(args: argparse.Namespace) -> tuple[dict[str, int] | None, str | None]:
    """Mesh and hardware from --mesh, --devices and --hardware.

    Raises:
      MeshError: they contradict each other.
    """
    hardware, count = args.hardware, args.devices
    if count is None:
        return args.mesh, hardware
    if args.mesh is not None:
        raise MeshError(
            "`plan`: --mesh and --devices are both given.",
            numbers=f"--mesh {args.mesh}, --devices {count}",
            fix="give --mesh to fix the mesh, or --devices to let rhino choose it.",
        )
    name, colon, topology = (hardware or "cpu").rpartition(":")
    if colon and topology.replace("x", "").isdecimal():
        there = math.prod(int(n) for n in topology.split("x") if n)
        if there == count:
            return None, hardware
        raise MeshError(
            f"`plan`: --hardware {hardware} and --devices do not agree.",
            numbers=f"{hardware} has {there} devices, --devices {count}",
            fix=f"leave out --devices, or write --hardware {name}.",
        )
    return None, f"{hardware or 'cpu'}:{count}"
