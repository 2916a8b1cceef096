"""The commands `verify` and `audit`: a plan, or a program sharded by hand, compiled."""

from __future__ import annotations

import argparse
from typing import Any

import jax
from jax.sharding import NamedSharding

import rhino_jax as rhino
from rhino_jax.commands.planning import (
    add_command,
    add_planning,
    add_showing,
    add_stages,
    called,
    keywords,
    plan_call,
    write_page,
)
from rhino_jax.commands.words import read_pins
from rhino_jax.errors import HardwareError, MeshError, RhinoError
from rhino_jax.frontend.call import split_call
from rhino_jax.frontend.parameters import read_parameters
from rhino_jax.frontend.trace import trace_call
from rhino_jax.hardware.files import load_target
from rhino_jax.plan.resolved_pins import resolve_pins
from rhino_jax.runtime.constraints import spec_on_mesh
from rhino_jax.runtime.meshes import axes_of_mesh
from rhino_jax.verify.places import emulated_mesh
from rhino_jax.verify.targets import compile_target


def add_verify(commands: Any) -> None:
    verify = add_command(
        commands,
        "verify",
        _run_verify,
        help="compile a plan for its hardware and compare it with its predictions",
        description="Plan a function or a model, or read a saved plan of it, compile"
        " it for the plan's hardware, which need not be there, and compare. Ends with 1"
        " where step time, peak memory or traffic are not as predicted.",
    )
    verify.add_argument("--plan", metavar="FILE", help="a saved plan of the target")
    verify.add_argument(
        "--compile-for", metavar="v5e:4x4", help="default: the plan's hardware, or cpu"
    )
    add_planning(verify)
    add_stages(verify)
    add_showing(verify)


def add_audit(commands: Any) -> None:
    audit = add_command(
        commands,
        "audit",
        _run_audit,
        help="compare a program that is sharded by hand with rhino's plan of it",
        description="Compile a program as its author sharded it and read it back; then"
        " plan the same function, and compare.",
    )
    audit.add_argument(
        "--sharded",
        action="append",
        default=[],
        metavar="PATH=SPEC",
        help="how arguments are sharded, where the program does not specify it;"
        " written as --pins",
    )
    add_planning(audit)
    add_showing(audit)


def _run_verify(args: argparse.Namespace) -> int:
    call = called(args)
    if args.plan is None:
        plan = plan_call(args, call)
    else:
        _refuse_planning(args)
        plan = rhino.load_plan(args.plan)
    nums = call.options.get("static_argnums")
    verified = plan.verify(
        call.fn,
        *call.args,
        compile_for=args.compile_for or _compile_for(plan),
        static_argnums=nums,
        **call.kwargs,
    )
    if args.html:
        title = f"verification of {plan.program_name}"
        write_page(args.html, verified._repr_html_(), title)
    print(verified.table(full=args.full))
    return 0 if verified.ok else 1


def _compile_for(plan: rhino.Plan) -> str | None:
    """Return the plan's hardware, as devices present may be of another kind.

    "cpu" for emulated devices; None if the hardware is unknown.
    """
    try:
        target = load_target(plan.hardware)
    except HardwareError:
        return None
    return "cpu" if "cpu" in target.device.kinds else plan.hardware


def _refuse_planning(args: argparse.Namespace) -> None:
    """Refuse options of planning that are given with a saved plan.

    Raises:
      RhinoError: --plan is given with an option that would change the plan.
    """
    given = [
        flag
        for flag, is_given in (
            ("--mesh", args.mesh),
            ("--devices", args.devices),
            ("--hardware", args.hardware),
            ("--memory-budget", args.memory_budget_bytes),
            ("--pins", args.pins),
            ("--refine", args.refine),
        )
        if is_given
    ]
    if given:
        raise RhinoError(
            f"`verify`: --plan is given together with {', '.join(given)}.",
            where=f"--plan {args.plan}",
            fix=f"leave out {', '.join(given)}: the saved plan has its own;"
            " --compile-for says what to compile for.",
        )


def _run_audit(args: argparse.Namespace) -> None:
    call = called(args)
    asked = keywords(args)
    mesh = _mesh_to_compile_for(asked["mesh"], asked["hardware"])
    arguments, named = _sharded(call, args.sharded, mesh)
    found = rhino.audit(
        call.fn, *arguments, **(asked | {"mesh": mesh}), **call.options, **named
    )
    if args.html:
        title = f"audit of {found.program_name}"
        write_page(args.html, found._repr_html_(), title)
    print(found.table(full=args.full))


def _mesh_to_compile_for(axes: dict[str, int] | None, hardware: str | None) -> Any:
    """Return the mesh on which a program is compiled as it is.

    Raises:
      MeshError: neither axes nor hardware are given.
    """
    if axes is None and (hardware is None or hardware.startswith("cpu")):
        raise MeshError(
            "`audit`: the mesh of the program is not given.",
            where="--mesh",
            fix="write --mesh data=4,model=2 with the axes that the program names, and"
            " --hardware v5e:4x2 to compile for it.",
        )
    if hardware is None or "cpu" in load_target(hardware).device.kinds:
        assert axes is not None
        return emulated_mesh(axes)
    return compile_target(hardware, axes)


def _sharded(call: Any, words: list[str], mesh: Any) -> tuple[Any, Any]:
    """Return the arguments with the shardings that --sharded specifies."""
    specs = read_pins(words)
    if not specs:
        return call.args, call.kwargs
    parameters = read_parameters(call.fn, **call.options, what="`audit`")
    split = split_call(parameters, call.args, call.kwargs, "`audit`")
    program = trace_call(parameters, split, mesh=mesh, what="`audit`").program
    pins = resolve_pins(specs, program, axes_of_mesh(mesh)).inputs
    arrays = [
        x
        if i not in pins
        else jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(mesh, spec_on_mesh(pins[i], x.shape, mesh)),
        )
        for i, x in enumerate(split.leaves.arrays)
    ]
    return split.leaves.unflatten(arrays)
