"""Options of `auto_shard`, `plan`, `audit`, `sweep` and `plan_together`: one record.

`UserOptions` has the name, type and meaning of each; their defaults are those of
`PlanOptions`, and None for options of the call. `with_options` gives them to a
function: in its signature and docstring, as `help` shows them. Editors and type
checkers read them from `UserOptions`.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from rhino_jax.errors import OptionError, nearest
from rhino_jax.explain.plan import Plan
from rhino_jax.hardware.target import Target
from rhino_jax.planner.options import PlanOptions
from rhino_jax.runtime.sharded import ShardedFunction


class UserOptions(TypedDict, total=False):
    """Options of `rhino.auto_shard`.

    Attributes:
      mesh: a `Mesh`, `AbstractMesh`, or mapping of axis name to size. None: the mesh in
        context (`jax.set_mesh`), or else rhino chooses.
      hardware: name, path of a TOML file, or `Target`; None: the devices present.
      memory_budget_bytes: per device, as 12e9 or "16GiB"; None: the memory of the
        hardware.
      pins: tree path or glob → PartitionSpec, of arguments and results; or argument
        name → a pytree of them; or all arguments' (`plan.in_specs`). A spec may be
        given for a whole subtree, None pins nothing, and a NamedSharding over the same
        mesh counts as a spec. Values inside of the function are pinned by source line
        ("model.py:61") or scope ("encoder/layer_*"), or with `rhino.pin`. A number
        instead of a spec is the stage of the ops that read an argument, or that are on
        a line or in a scope; a name is the form of calls there (`rhino.choose`), "*" of
        all calls.
      in_shardings, out_shardings: pins of arguments and results, written as in
        `jax.jit`: pytree prefixes of PartitionSpecs or NamedShardings; None leaves a
        subtree to the planner. `pins` of the same arrays take precedence.
      level: "best" solves the whole at once and reports the gap, "fast" stops at the
        first good plan.
      time_limit_s: wall-clock limit of planning, without tracing, in seconds, or as
        "2min". Building the model and reading a plan cannot be interrupted (0.4 s for
        GPT-2 small); the best recipe is taken then. The notes of a plan say if the
        limit stopped its search.
      seed: seed of the search.
      refine: compile this many of the most promising plans (the best, recipes,
        runners-up), and in addition dp, zero1 and fsdp with every activation pinned to
        the batch, as most people type them, if their predicted step is at most 30 %
        longer; choose the one with the fastest compiled step within memory. "auto":
        compile the plan, correct the costs of its ops by what they take there, plan
        again, and compile that too where it is expected to gain 1 %; choose the faster.
        The corrections are kept in the plan cache for other plans of the function. 0:
        rely on the prediction.
      microbatches: number of micro-batches of a batch, run one after the other with
        accumulated gradients; results are those of the whole batch. 1: no
        micro-batches. "auto": if the program would not fit, or is faster with them; if
        the logits of a vocabulary are what does not fit, the loss alone is computed in
        chunks of tokens.
      per_microbatch: ops whose sums over the batch are taken of each micro-batch
        instead of the whole batch, which changes results, as of BatchNorm in other
        frameworks: modules or scopes ("BatchNorm", "encoder/norm_*"), functions
        ("batch_norm") or lines ("model.py:61") of ops that use such sums. State that
        they update, such as running statistics, is updated once, by the mean over the
        micro-batches, so that its momentum is that of a step, whatever their number.
      recompute: rematerialization of forward values in the backward pass. "auto": what
        pays, regardless of `jax.checkpoint`; "as written": as `jax.checkpoint`
        specifies; "none": no remat. In several stages "auto" is as written; in a stage
        that does not fit so, or fits only with slower layouts, or is faster with less
        memory traffic, the values that pay are recomputed. Only with "auto" are values
        offloaded to host memory, if the hardware file has `host_bytes_per_s`.
      loops: "auto": a loop over at most 32 layers is unrolled where the compiler copies
        what it stacks for the backward pass, and that is faster; compiling takes
        longer. "as written": loops stay.
      grouped: grouped matmuls (`jax.lax.ragged_dot`). "auto": on GPUs, those in
        bfloat16, float16 and float32 run in a Triton kernel of rhino's, forward and
        backward, where XLA multiplies every group with all rows; tokens that are sorted
        by expert are sorted on each device by itself, with its experts first where
        these are sharded, if that is faster. "as written": XLA's products, of all
        tokens sorted together.
      stacks: "auto": isomorphic chains of matrix products or factorizations on leaves
        of one shape (Muon's orthogonalization, roots of Shampoo and SOAP) are computed
        as one batched chain, sharded over the leaves, if that is faster. "as written":
        each leaf by itself.
      attention: "auto": attention that is written out, as a product, a softmax and a
        product (that of JAX, flax and equinox, too), runs as cuDNN's kernel on GPU or
        as JAX's splash kernel on TPU if that is faster: equal but for rounding, and
        without its scores in memory. "as written": it stays so.
      offload: "auto": where nothing fits otherwise, state that only updates read
        (moments of an optimizer) waits in the host's memory between steps, if the
        hardware file has `host_bytes_per_s`: a step takes and returns it there. "as
        written": state stays where it is given.
      stages: number of submeshes into which devices are divided, each of which runs a
        part of the model, on one micro-batch after another. "auto": the size of the
        mesh axis named `stage`; without a mesh, the fastest number, if slow links or
        too little memory suggest several. `[4, 2, 2]`: submeshes of these numbers of
        devices, which together are all.
      schedule: order in which stages run their micro-batches: "gpipe", "1f1b", "kfkb";
        "forward-only": programs without gradients; "zero-bubble": gradients of weights
        fill the bubbles; "interleaved" and "zero-bubble-v": two chunks of the model on
        each stage; "searched"; "auto": the fastest of these that fits; "one-program" if
        none does or if it is clearly faster. "one-program" is an SPMD pipeline: layers
        are a scan over stacks [layers, …], of which stages have equal parts, and all
        stages are one compiled program on one mesh, for `lower` and TPU pods; in the
        order of "gpipe", with ops outside of the layers shared by the stages.
        "token-slices": sequence slices of causal sequences pass through the stages one
        after the other (TeraPipe), forward from the first one and backward from the
        last: for few long sequences, and a batch of one ("auto" compares it if
        micro-batches are fewer than stages). Their number and lengths are chosen;
        "token-slices:4": four; "token-slices:768,640,640": slices of these numbers of
        tokens.
      storage: "blocks": interleaved storage: state may be stored with columns of fused
        weights `(d, 3·h·k)`, `(d, 2·f)` in another order, if steps are faster so;
        shapes stay. Arrays come from `plan.init` and `plan.put`, and `plan.as_written`
        restores their order; other arrays are refused. "as written": arrays keep their
        order. With `like`, as in the other plan.
      while_trips: trip counts of `while` loops with a data-dependent end, for planning
        and verification: a number for all, or by line ("model.py:61"), function or
        scope. None: the program's own bound of a loop, else 10.
      like: a result of `auto_shard` (its last plan counts), or a plan, that shares
        state with this one. The mesh and hardware are the same, and arguments of equal
        tree path and shape, or of equal structure, keep their sharding unless `pins`
        specify another; and their stage, so that a model that was edited in places has
        the same stage cuts. A number for `stages=` chooses new cuts; so does rhino if
        the old cuts are not possible any more, and a note says why.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in `jax.jit`.
      progress: show a line while planning takes long; or a function that is called with
        (best, bound) in seconds.
      dump: a folder, created if needed, to which every pass from the program to the
        plan writes its result as text (`rhino_jax.planner.search.passes`).
    """

    mesh: Any
    hardware: str | Path | Target | None
    memory_budget_bytes: float | str | None
    pins: Any
    in_shardings: Any
    out_shardings: Any
    level: str
    time_limit_s: float | str | None
    seed: int
    refine: int | str
    microbatches: int | str
    per_microbatch: str | Sequence[str]
    recompute: str
    loops: str
    grouped: str
    stacks: str
    attention: str
    offload: str
    stages: int | str | Sequence[int]
    schedule: str
    storage: str
    while_trips: int | Mapping[str, int] | None
    like: ShardedFunction | Plan | None
    donate_argnums: int | Iterable[int] | None
    donate_argnames: str | Iterable[str] | None
    static_argnums: int | Iterable[int] | None
    static_argnames: str | Iterable[str] | None
    progress: bool | Callable[[float | None, float | None], None]
    dump: str | PathLike[str] | None


DEFAULTS: Mapping[str, Any] = dict.fromkeys(UserOptions.__annotations__) | {
    f.name: f.default for f in fields(PlanOptions) if f.default is not MISSING
}


Result = TypeVar("Result", covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])


class TakesCall(Protocol[Result]):
    """A function of a user's function, its arguments, and options.

    The second form is for arguments that the user's function takes by name.
    """

    @overload
    def __call__(
        self, fn: Callable[..., Any], *args: Any, **options: Unpack[UserOptions]
    ) -> Result: ...

    @overload
    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Result: ...


def with_options(
    *names: str, own: Mapping[str, str] = MappingProxyType({}), **defaults: Any
) -> Callable[[Function], Function]:
    """Return a decorator that gives a function these options.

    The function takes them as `**options`, or, together with arguments of the user's
    function, as `**kwargs`; `split_options` completes them. In its docstring,
    `**options` as an argument becomes the description of all.

    Args:
      names: names of `UserOptions`, in their order in the signature.
      own: name → type of options that mean something else here; their default is None.
      defaults: defaults that differ from those of `auto_shard`.
    """
    hints = {n: hint.__forward_arg__ for n, hint in UserOptions.__annotations__.items()}
    hints |= own

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *first, last = signature.parameters.values()
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, None if name in own else DEFAULTS[name]),
                annotation=hints[name],
            )
            for name in names
        ]
        rest = [last] if last.name == "kwargs" else []
        found = signature.replace(parameters=[*first, *options, *rest])
        function.__signature__ = found  # type: ignore[attr-defined]
        page = inspect.getdoc(UserOptions) or ""
        described = page.partition("Attributes:\n")[2]
        described = textwrap.indent(textwrap.dedent(described), " " * 6)
        doc = (function.__doc__ or "").replace("      **options: options.", described)
        function.__doc__ = doc
        return function

    return decorate


def with_options_of_call(
    *names: str, **changed: Any
) -> Callable[[Callable[..., Result]], TakesCall[Result]]:
    """Return `with_options` for a function that also takes a user's function's call."""
    return cast(Any, with_options(*names, **changed))


def split_options(
    function: Callable[..., Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into the options of a function, completed by defaults, and others.

    Args:
      function: a function that `with_options` decorated.
      given: the keywords of a call.
    Raises:
      OptionError: there are others, and the function takes no arguments of a user's
        function.
    """
    options, takes_others = _options_of(function)
    others = {name: x for name, x in given.items() if name not in options}
    if others and not takes_others:
        name = next(iter(others))
        raise OptionError(
            f"`{function.__name__}` has no option {name!r}.{nearest(name, options)}",
            where=f"{name}=",
            numbers=f"options: {', '.join(options)}",
            fix="write the option as it is spelt, or leave it out.",
        )
    return {name: given.get(name, x) for name, x in options.items()}, others


@functools.cache
def _options_of(function: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    parameters = inspect.signature(function).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return options, any(p.kind is p.VAR_KEYWORD for p in parameters)
