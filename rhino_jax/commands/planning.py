"""The command `plan`, and options of planning that other commands share."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import rhino_jax as rhino
from rhino_jax.commands.words import (
    EXIT_CODES,
    PINS_HELP,
    gib,
    mesh_axes,
    positive,
    positive_int,
    read_pins,
    size_bytes,
)
from rhino_jax.errors import MeshError, RhinoError
from rhino_jax.explain.report.html import page
from rhino_jax.explain.report.views.page import plan_page
from rhino_jax.planner.options import PlanOptions
from rhino_jax.utils.atomic_write import write_file


if TYPE_CHECKING:
    from rhino_jax.commands.loading import LoadedCall


SHAPES_HELP = """\
--shapes names a TOML file with the arguments of the function:

    init = "train:init"            # optional: what this function returns comes first
    donate_argnums = [0]           # optional, as in jax.jit; so is static_argnums

    [[args]]                       # the next positional argument, a dict of arrays
    tokens = "int32[64,1024]"
    mask = "bool[64,1024]"

    [kwargs]                       # keyword arguments
    scale = "float32[]"

An argument that is no dict is written in place: args = ["float32[8,128]"].
"""


def add_plan(commands: Any) -> None:
    plan = add_command(
        commands,
        "plan",
        _run_plan,
        help="plan a function or a model of the zoo",
        description="Plan a function, or a model of the zoo, from shapes alone.",
    )
    add_planning(plan)
    add_stages(plan)
    plan.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    add_showing(plan)


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    *,
    help: str,
    description: str,
) -> argparse.ArgumentParser:
    """Add a command on a function or model, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"{SHAPES_HELP}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", help="`module:function` (with --shapes), or a model, as gpt-7b"
    )
    parser.add_argument(
        "--shapes", metavar="FILE.toml", help="abstract arguments; see below"
    )
    parser.set_defaults(run=run, command=name)
    return parser


def count_or_auto(text: str) -> int | str:
    """Parse an integer ≥ 1, or "auto"."""
    return text if text == "auto" else positive_int(text)


def stages_of(text: str) -> int | str | list[int]:
    """Parse an integer ≥ 1, "auto", or the devices of every stage, as 4,2,2."""
    if "," not in text:
        return count_or_auto(text)
    return [positive_int(part) for part in text.split(",")]


def add_planning(parser: argparse.ArgumentParser) -> None:
    """Add the options of planning."""
    parser.add_argument("--mesh", type=mesh_axes, metavar="data=4,model=2")
    parser.add_argument(
        "--devices",
        type=positive_int,
        metavar="N",
        help="let rhino choose a mesh of this many devices",
    )
    parser.add_argument("--hardware", help="as v5e, h100:8x8, or a TOML file")
    budget = parser.add_mutually_exclusive_group()
    bytes_of = "memory_budget_bytes"
    budget.add_argument(
        "--memory-budget", type=size_bytes, dest=bytes_of, metavar="16GiB",
        help="memory of one device",
    )  # fmt: skip
    budget.add_argument("--budget-gib", type=gib, dest=bytes_of, help=argparse.SUPPRESS)
    parser.add_argument(
        "--pins", action="append", default=[], metavar="PATH=SPEC", help=PINS_HELP
    )
    parser.add_argument("--level", choices=("fast", "best"), default="best")
    parser.add_argument("--time-limit-s", type=positive)
    parser.add_argument("--seed", type=int, default=0, help="seed of the search")
    parser.add_argument(
        "--refine",
        type=count_or_auto,
        default=0,
        metavar="N",
        help="compile this many plans and keep the one with the fastest compiled step;"
        " auto: correct the costs by the compiled plan, and plan again",
    )
    parser.add_argument(
        "--microbatches",
        type=count_or_auto,
        default="auto",
        metavar="N",
        help="number of micro-batches of a batch, which run one after the other",
    )
    parser.add_argument(
        "--per-microbatch",
        action="append",
        default=[],
        metavar="NAME",
        help="a module, scope, function or line whose sums over the batch are taken of"
        " each micro-batch, as BatchNorm",
    )
    parser.add_argument(
        "--while-trips",
        type=positive_int,
        metavar="N",
        help="assumed trip count of `while` loops with a data-dependent end",
    )
    _add_variants(parser)
    parser.add_argument("--no-progress", action="store_true")


def _add_variants(parser: argparse.ArgumentParser) -> None:
    """Add the options on what may be rewritten."""
    parser.add_argument(
        "--recompute",
        choices=("auto", "as written", "none"),
        default="auto",
        help="which values the backward pass recomputes",
    )
    choices = "auto", "as written"
    for default, options in (("as written", _AUTO), ("auto", _AS_WRITTEN)):
        for name, meaning in options.items():
            parser.add_argument(
                f"--{name}", choices=choices, default=default, help=meaning
            )


_AUTO = {
    "offload": "whether state may wait in host memory where nothing fits otherwise",
    "attention": "whether attention that is written out may run as cuDNN's or JAX's"
    " splash kernel",
}
"""Option → what it leaves to the planner, if the user says so."""

_AS_WRITTEN = {
    "loops": "whether loops over layers may be unrolled, which compiles longer",
    "grouped": "whether tokens may be sorted by expert on each device, and multiplied"
    " in a kernel of rhino's on GPUs",
    "stacks": "whether isomorphic products of many leaves may be computed as one stack",
}
"""Option → what it leaves to the planner, unless the program stays as written."""


def add_stages(parser: argparse.ArgumentParser) -> None:
    """Add the options on stages and storage."""
    parser.add_argument(
        "--storage",
        choices=("as written", "blocks"),
        default="as written",
        help="whether fused weights may be stored interleaved (block-cyclic)",
    )
    parser.add_argument(
        "--stages",
        type=stages_of,
        default="auto",
        metavar="N",
        help="number of pipeline stages; 4,2,2: devices of each",
    )
    parser.add_argument(
        "--schedule",
        default="auto",
        metavar="NAME",
        help="order in which stages run micro-batches: gpipe, 1f1b, …",
    )


def add_showing(parser: argparse.ArgumentParser) -> None:
    """Add the options on how a result is shown."""
    parser.add_argument("--html", metavar="FILE", help="write it as a page")
    parser.add_argument("--full", action="store_true", help="show every row")


def keywords(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given keywords of `auto_shard`."""
    mesh, hardware = _place(args)
    given = {k: x for k, x in vars(args).items() if k in PlanOptions.__annotations__}
    return given | {
        "mesh": mesh,
        "hardware": hardware,
        "pins": read_pins(args.pins),
        "progress": not args.no_progress,
    }


def called(args: argparse.Namespace) -> LoadedCall:
    """Load the call that the command line specifies."""
    from rhino_jax.commands.loading import load_call

    return load_call(args.target, args.shapes, args.command)


def plan_call(args: argparse.Namespace, call: LoadedCall | None = None) -> rhino.Plan:
    """Plan the call that the command line specifies.

    Args:
      args: the parsed command line.
      call: the function with its arguments, if it is loaded already.

    Raises:
      LoadingError: the user's function raises while it is traced.
    """
    from rhino_jax.commands.loading import tracing_error

    call = call or called(args)
    sharded = rhino.auto_shard(call.fn, **keywords(args), **call.options)
    try:
        return sharded.plan(*call.args, **call.kwargs)
    except RhinoError:
        raise
    except Exception as error:
        # Tracing adds a note to errors of the user's function; any other error is an
        # internal one, and keeps its traceback.
        if not hasattr(error, "__notes__"):
            raise
        raise tracing_error(args.target, error) from error


def _run_plan(args: argparse.Namespace) -> None:
    plan = plan_call(args)
    if args.save:
        plan.save(args.save)
        print(f"saved to {args.save}", file=sys.stderr)
    tell_plan(plan, args)


def tell_plan(plan: rhino.Plan, args: argparse.Namespace) -> None:
    """Write the page, if requested, and print the table."""
    if args.html:
        write_file("`--html`", args.html, plan_page(plan))
        print(f"page written to {args.html}", file=sys.stderr)
    print(plan.table(full=args.full))


def write_page(path: str, body: str, title: str) -> None:
    write_file("`--html`", path, page(body, title=title))
    print(f"page written to {path}", file=sys.stderr)


def _place(args: argparse.Namespace) -> tuple[dict[str, int] | None, str | None]:
    """Return mesh and hardware from --mesh, --devices and --hardware.

    Raises:
      MeshError: they contradict each other.
    """
    hardware, count = args.hardware, args.devices
    if count is None:
        return args.mesh, hardware
    if args.mesh is not None:
        raise MeshError(
            f"`{args.command}`: --mesh and --devices are both given.",
            numbers=f"--mesh {args.mesh}, --devices {count}",
            fix="give --mesh to fix the mesh, or --devices to let rhino choose it.",
        )
    name, colon, topology = (hardware or "cpu").rpartition(":")
    if colon and topology.replace("x", "").isdecimal():
        there = math.prod(int(n) for n in topology.split("x") if n)
        if there == count:
            return None, hardware
        raise MeshError(
            f"`{args.command}`: --hardware {hardware} and --devices do not agree.",
            numbers=f"{hardware} has {there} devices, --devices {count}",
            fix=f"leave out --devices, or write --hardware {name}.",
        )
    return None, f"{hardware or 'cpu'}:{count}"
