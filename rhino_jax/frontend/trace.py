"""Tracing of a user's function on shapes alone: its jaxpr, its program, its trees.

Nothing is allocated and nothing runs. Errors of the user's function are raised
unchanged, with a note that names the call that traced it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from rhino_jax._compat import jaxpr_consts, type_on
from rhino_jax.errors import TraceError
from rhino_jax.frontend.call import Call, Signature, split_call
from rhino_jax.frontend.forms.calls import CallTrace, Forms, Replacing
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.frontend.leaves import (
    Leaves,
    Static,
    split_arguments,
    split_result,
)
from rhino_jax.frontend.objects.held import Written
from rhino_jax.frontend.objects.lift import call_on_objects, shown
from rhino_jax.frontend.parameters import Parameters, read_parameters
from rhino_jax.frontend.state import tie
from rhino_jax.frontend.tracing.captured import CapturedReferences, refuse_objects
from rhino_jax.frontend.tracing.in_context import trace_flat
from rhino_jax.frontend.tracing.leaks import leak_watch
from rhino_jax.ir.program import Program
from rhino_jax.utils.keywords import brief


@dataclass(frozen=True, slots=True)
class Traced:
    """A function, traced for one signature.

    Attributes:
      name: the function's name.
      closed_jaxpr: the jaxpr; its inputs are the argument arrays, its constants the
        captured arrays.
      program: the program for the planner; its inputs are arguments, then constants.
      signature: the signature that it was traced for.
      arguments: the leaves of the call; arrays as `jax.ShapeDtypeStruct`.
      result: the leaves of the result, likewise.
      donated: whether each argument array is donated.
      written: the values to write back to objects among the arguments, whose arrays
        follow those of the result; None where there are no objects.
      captured: references that the function captures; they are the last of its
        constants, and their final values the last of its results.
      in_tree, out_tree: structure and positions of the arrays of the arguments and of
        the result, as a plan shows them.
      out_types: shape and type, weak or not, of every result, and of every array that
        is written back; types in the jaxpr are strong.
      forms: the calls of `rhino.choose`'s functions; None: not known.
      after_passes: traces after passes (see `rhino_jax.passes`), by name and choice.
    """

    name: str
    closed_jaxpr: Any
    program: Program
    signature: Signature
    arguments: Leaves
    result: Leaves
    donated: tuple[bool, ...]
    written: Written | None
    captured: CapturedReferences
    in_tree: tuple[Any, tuple[int, ...]]
    out_tree: tuple[Any, tuple[int, ...]]
    out_types: tuple[jax.ShapeDtypeStruct, ...]
    forms: Forms | None = field(default=None, compare=False, repr=False)
    after_passes: dict[tuple[str, str], Traced] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def consts(self) -> tuple[Any, ...]:
        """The captured arrays, with the current values of captured references."""
        consts = jaxpr_consts(self.closed_jaxpr)
        if not self.captured:
            return consts
        return (*consts[: -len(self.captured.references)], *self.captured.values())

    @property
    def has_captured_tracers(self) -> bool:
        """Whether it closes over values of an outer trace, and is only valid during
        it."""
        return any(isinstance(c, jax.core.Tracer) for c in self.consts)


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mesh: Any = None,
    what: str = "`rhino.plan`",
    **calling: Any,
) -> Traced:
    """Trace `fn(*args, **kwargs)` on shapes.

    Args:
      fn: the function; a `jax.jit` wrapper is removed.
      args, kwargs: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
      mesh: mesh with Auto axes that is in context for the function; None: no mesh is.
      what: the caller, for notes and messages.
      calling: `static_argnums`, `static_argnames`, `donate_argnums` and
        `donate_argnames`, as in `jax.jit`.

    Raises:
      TraceError: bad static or donated arguments, or one without arrays that `fn`
        computes with. Other exceptions of `fn` itself are raised unchanged.
    """
    parameters = read_parameters(fn, what=what, **calling)
    call = split_call(parameters, args, kwargs, what)
    return trace_call(parameters, call, mesh=mesh, what=what)


FlatResult = tuple[Leaves, Written | None, Any]
"""The leaves of a result, the values to write back to objects, and the result's tree as
a plan shows it."""


def flat_function(
    parameters: Parameters, call: Call, results: list[FlatResult] | None = None
) -> Callable[..., list[Any]]:
    """Return the user's function as a function of the arrays of a call alone, for
    tracing.

    It returns the arrays of the result, then those to write back to objects.

    Args:
      parameters: the parameters of the function.
      call: the call.
      results: extended by the `FlatResult` of each trace; None: it is not recorded.
    """
    arguments, names = call.leaves, parameters.names(len(call.args))

    def run(*args: Any, **kwargs: Any) -> Any:
        everything, named = _put_statics(args, kwargs, call.statics)
        return parameters.fn(*everything, **named)

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = arguments.unflatten(arrays)
        after: list[Any] = []
        written: Written | None = None
        if call.lifted is None:
            value = run(*args, **kwargs)
        else:
            value, after, written = call_on_objects(
                run,
                args,
                kwargs,
                arguments,
                lambda a, k: split_arguments(a, k, names),
                has_states=parameters.is_of_nnx,
            )
        result = split_result(value)
        if written is not None:
            after, written = written.beside(result.arrays, after)
        if results is not None:
            tree = shown(value, result.positions)
            nothing = [None] * len(result.positions)
            results.append((result.with_arrays(nothing), written, tree))
        return [*result.arrays, *after]

    return flat


def _refuse_no_arrays(
    arguments: Leaves, error: Exception, what: str, name: str
) -> None:
    """Refuse arguments without any array, if a trace failed for the type of a value.

    Raises:
      TraceError: names them.
    """
    if not isinstance(error, AttributeError | TypeError):
        return
    groups = {arguments.groups[p] for p in arguments.positions}
    found = {
        arguments.paths[p]: static.value
        for p, static in arguments.statics
        if arguments.groups[p] not in groups and not callable(static.value)
    }
    if not found:
        return
    kinds = ", ".join(f"{k} is {brief(v)}" for k, v in found.items())
    raise TraceError(
        f"{what}: `{name}` computes with an argument that is no array.",
        where=", ".join(found),
        numbers=f"{kinds}; {error}",
        fix="pass arrays, or jax.ShapeDtypeStruct(shape, dtype) to plan from shapes"
        " alone; the name of a model is for `python -m rhino_jax plan`.",
    ) from error


def trace_call(
    parameters: Parameters, call: Call, *, mesh: Any = None, what: str
) -> Traced:
    """Trace a call that is already split; see `trace`."""
    arguments = call.leaves
    # Python numbers have no shape, and NumPy's types are converted, unless x64 is on.
    of_arrays = (
        x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
        for x in arguments.arrays
    )
    types = [*map(type_on, of_arrays)]
    results: list[FlatResult] = []
    flat = flat_function(parameters, call, results)
    statics = [(str(key), static.value) for key, static in call.statics]
    statics += [(arguments.paths[p], static.value) for p, static in arguments.statics]
    check_leaks = leak_watch(parameters.fn, statics)
    names = {"fn": parameters.fn, "name": parameters.name, "what": what}
    within = {**names, "paths": arguments.array_paths, "mesh": mesh}
    calls = CallTrace()
    try:
        closed, outs, captured, transforms = trace_flat(
            flat, types, calls=calls, **within
        )
    except Exception as error:
        refuse_objects(parameters.fn, error, what, parameters.name)
        _refuse_no_arrays(arguments, error, what, parameters.name)
        error.add_note(f"raised while {what} traced `{parameters.name}`")
        raise
    check_leaks(what, parameters.name)
    result, written, out_tree = results[-1]
    count = len(result.positions)
    result = result.with_arrays(outs[:count])
    # Traces must not keep the argument arrays alive.
    arguments = arguments.with_arrays(types)
    call = replace(call, leaves=arguments)
    ends = tie(parameters, call, result, written, outs, captured, closed)
    program = import_jaxpr(
        closed,
        name=parameters.name,
        input_paths=arguments.array_paths,
        donated=ends.donated,
        captured_paths=captured.names,
        output_paths=ends.paths,
        state_of=ends.state_of,
    )
    return Traced(
        parameters.name,
        closed,
        replace(program, transforms=transforms),
        call.signature(),
        arguments,
        result,
        ends.donated,
        written,
        captured,
        shown((tuple(call.args), dict(call.kwargs)), arguments.positions),
        out_tree,
        tuple(outs),
        _forms(parameters, call, types, calls, within),
    )


def _forms(
    parameters: Parameters,
    call: Call,
    types: Sequence[jax.ShapeDtypeStruct],
    calls: CallTrace,
    within: Mapping[str, Any],
) -> Forms:
    """Return the calls of `rhino.choose`'s functions in a trace, with a function that
    traces again with other forms.

    Args:
      parameters, call: the function and its call, without arrays.
      types: types of the argument arrays.
      calls: the calls of the trace.
      within: arguments of `trace_flat`.
    """
    # Traces must not keep the argument arrays alive.
    call = replace(call, args=(None,) * len(call.args), kwargs={})
    known = dict(calls.sites)

    def traced(
        chosen: Mapping[str, str], replacing: Replacing | None
    ) -> tuple[Any, list[Any], list[str]]:
        again = CallTrace(chosen, known, replacing)
        flat = flat_function(parameters, call)
        closed, outs, _, _ = trace_flat(flat, types, calls=again, **within)
        return closed, outs, [site.key for site in again.sites.values()]

    return Forms(tuple(calls.sites.values()), calls.jaxpr, traced, known)


def another_program(traced: Traced, change: str, what: str) -> TraceError:
    """Return the error on a function whose trace differs from call to call.

    Args:
      traced: the new trace; the same signature gave another program before.
      change: the first op that differs, as text; empty if unknown.
      what: the caller, for messages.
    """
    return TraceError(
        f"{what}: `{traced.name}` traces to another program than before, for the"
        " same arguments.",
        where=f"`{traced.name}`",
        numbers=change or "which op differs is not known",
        fix="take out what changes from call to call (a global counter, a list that"
        " grows, random shapes), or pass it as an argument.",
    )


def _put_statics(
    args: Any, kwargs: Any, statics: Sequence[tuple[str | int, Static]]
) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = list(args), dict(kwargs)
    for key, static in statics:
        if isinstance(key, int):
            args[key] = static.value
        else:
            kwargs[key] = static.value
    return args, kwargs
