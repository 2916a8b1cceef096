"""The rules of primitives, by name.

A rule sees the shapes, types and parameters of one op and returns its factors.
The built-in rules live in `frontend/rules/`, one file per family; users add
theirs with `register_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rhino_jax.errors import RuleError
from rhino_jax.ir.factor import Rule, check_text, parse_rule
from rhino_jax.ir.traits import Traits
from rhino_jax.utils.keywords import brief


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContext:
    """The properties of an op that its rule may depend on.

    Attributes:
      primitive: the primitive's name.
      in_shapes, in_dtypes: shape and element type of every operand, including literals
        and scalars.
      out_shapes, out_dtypes: shape and element type of every result.
      params: the primitive's parameters.
    """

    primitive: str
    in_shapes: tuple[tuple[int, ...], ...]
    in_dtypes: tuple[str, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    out_dtypes: tuple[str, ...]
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OpRule:
    """The factors and the other properties of one op, as a rule returns them.

    Attributes:
      rule: the factors, and the dims that they appear in.
      flops: floating-point operations of the whole op.
      is_fusible: whether the op can be computed in its readers, without going through
        memory (elementwise ops, broadcasts, iotas, converts, slices).
      traits: further properties of this op; None: those that its primitive was
        registered with.
    """

    rule: Rule
    flops: float = 0.0
    is_fusible: bool = False
    traits: Traits | None = None


REDUCERS = ("sum", "max", "min", "prod", "and", "or")
"""The ways in which partial results may combine."""

RuleFn = Callable[[OpContext], OpRule]

Shape = tuple[int, ...]

LocalParams = Callable[
    [Mapping[str, Any], Sequence[Shape], Sequence[Shape]], dict[str, Any]
]
"""Function (parameters, shapes of parts of the operands, and of the results) →
parameters that differ on these parts."""

PartFn = Callable[[Sequence[Any], Shape, Callable[[int, Any], Any]], Any]
"""Function (operands, shape of a part of the result, function from a dim and an integer
dtype to the positions of the part's elements in the whole) → that part; positions are
None along a dim that is whole."""

_RULES: dict[str, RuleFn] = {}

_TRAITS: dict[str, Traits] = {}

_LOCAL: dict[str, LocalParams] = {}

_PARTS: dict[str, Callable[[Any], PartFn | None]] = {}

Label = Callable[[Mapping[str, Any]], str]
"""Function from the parameters of an op to a short description of them."""

_LABELS: dict[str, Label] = {
    "scan": lambda p: f"length {p['length']}",
    "cond": lambda p: f"{len(p['branches'])} branches",
    "ffi_call": lambda p: str(p.get("target_name") or ""),
    "call_hi_primitive": lambda p: type(p["_prim"]).__name__,
    **dict.fromkeys(
        ("jit", "pjit", "composite"),
        lambda p: "" if p.get("name") is None else str(p["name"]),
    ),
}
"""Primitive → its label; at first of those with regions, or with a body that is not
imported, which have no rule."""

_BUILT_IN: set[str] = set()
"""Primitives that have, or had, a built-in rule."""

_USER_RULES: set[str] = set()
"""Names that `register_rule` has set; kernels are looked up among these only."""


_MET: set[str] = set()
"""Names that some op's rule was looked up under."""


def register(
    *names: str,
    traits: Traits | Callable[[str], Traits],
    local: LocalParams | None = None,
    part: Callable[[Any], PartFn | None] | None = None,
    label: Label | None = None,
) -> Callable[[RuleFn], RuleFn]:
    """Return a decorator that registers a function as the rule of the named primitives.

    Args:
      names: names of the primitives.
      traits: their traits, or a function from each name to them; a rule may override
        them for one op (`OpRule.traits`).
      local: their parameters on a part of the dims; None: as on the whole.
      part: for ops whose elements depend on their positions: function from an equation
        to how a part of its result is generated.
      label: short description of their parameters, for people; None: there is none.
    """

    def wrap(fn: RuleFn) -> RuleFn:
        for name in names:
            _RULES[name] = fn
            _TRAITS[name] = traits if isinstance(traits, Traits) else traits(name)
            _BUILT_IN.add(name)
            if local is not None:
                _LOCAL[name] = local
            if part is not None:
                _PARTS[name] = part
            if label is not None:
                _LABELS[name] = label
        return fn

    return wrap


def part_of(eqn: Any) -> PartFn | None:
    """Return how a part of an equation's result is generated from positions.

    None where a part of it is no simpler than the whole.
    """
    found = _PARTS.get(eqn.primitive.name)
    return found(eqn) if found is not None else None


def result_shape(key: str, *, is_appended: bool = False) -> LocalParams:
    """Return the local parameters of an op whose parameter `key` is its result's
    shape; if it `is_appended`, without the operand's dims, which come first."""
    return lambda params, ins, outs: {
        key: tuple(outs[0][len(ins[0]) if is_appended else 0 :])
    }


def label_of(name: str, params: Mapping[str, Any]) -> str:
    """Return a short description of an op's parameters; empty where there is none."""
    describe = _LABELS.get(name)
    return describe(params) if describe else ""


def by_name(table: Mapping[T, str]) -> dict[str, T]:
    """Return primitive → fact, given fact → names of the primitives, as text."""
    return {name: fact for fact, names in table.items() for name in names.split()}


def numbers(found: Iterable[Any], mark: str = ",") -> str:
    """Format dims or sizes for a label, as `1,2`."""
    return mark.join(str(int(n)) for n in found)


def register_traits(
    *names: str, traits: Traits, local: LocalParams | None = None
) -> None:
    """Register the traits of primitives that have no rule, and local parameters."""
    _TRAITS.update(dict.fromkeys(names, traits))
    if local is not None:
        _LOCAL.update(dict.fromkeys(names, local))


def local_params(
    name: str, params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> dict[str, Any]:
    """Return an op's parameters on a part of its dims, as a micro-batch or a shard.

    Args:
      name: name of the primitive.
      params: its parameters on the whole.
      ins, outs: shapes of the parts of its operands and results.
    """
    changed = _LOCAL[name](params, ins, outs) if name in _LOCAL else {}
    return {**params, **changed}


def lookup(name: str) -> RuleFn | None:
    """Return the rule of a primitive, or None where it has none."""
    _MET.add(name)
    return _RULES.get(name)


def lookup_user(name: str) -> RuleFn | None:
    """Return a rule that the user registered, or None.

    Kernels (Pallas, FFI) are looked up here, so that a kernel called `add` does not get
    the rule of the primitive `add`.
    """
    if name not in _USER_RULES:
        return None
    _MET.add(name)
    return _RULES.get(name)


def traits_of(primitive: str, kernel: str | None = None) -> Traits:
    """Return the traits of a primitive's ops; for a kernel, those that the user
    registered for it, if any. Default traits where neither is known."""
    known = _TRAITS.get(primitive, Traits())
    if kernel in _USER_RULES and kernel in _TRAITS:
        return replace(_TRAITS[kernel], is_gathered=known.is_gathered)
    return known


def is_built_in(name: str) -> bool:
    """Whether a primitive has, or had, a built-in rule."""
    return name in _BUILT_IN


def unmet_rules() -> tuple[str, ...]:
    """Return the names of users' rules that no op has had so far, and no built-in rule,
    sorted."""
    return tuple(sorted(_USER_RULES - _MET - _BUILT_IN))


def has_user_rules() -> bool:
    """Whether any rule was registered by the user, so that other processes may lack
    it."""
    return bool(_USER_RULES)


def registered() -> tuple[str, ...]:
    """Return the names of all primitives that have a rule, sorted."""
    return tuple(sorted(_RULES))


def register_rule(
    primitive: Any,
    rule: str | RuleFn,
    *,
    reducers: Mapping[str, str] | None = None,
    flops: Callable[[OpContext], float] | None = None,
    traits: Traits | None = None,
) -> None:
    """Register how a primitive may be sharded.

    Args:
      primitive: a primitive or its name (for FFI calls, the target name; for Pallas
        kernels, the kernel's name).
      rule: einsum-like text, as `"b s d, d f -> b s f"` (see `rhino_jax.ir.factor`), or
        a function from `OpContext` to `OpRule`.
      reducers: for factors that no result contains, how partial results combine ("sum"
        where not given).
      flops: floating-point operations of one call; 0 where not given.
      traits: its traits, such as `Traits(OpKind.CONTRACTION)` for an op that runs on
        the matrix unit; None: those registered before, else its primitive's, else the
        default.

    Raises:
      RuleError: the text cannot be read.

    Example:
      >>> register_rule("my_matmul", "b s d, d f -> b s f")
    """
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str) or not name.strip():
        raise RuleError(
            "`register_rule`: this is no primitive and no name of one.",
            where="primitive",
            numbers=f"got {brief(primitive)} ({type(primitive).__name__})",
            fix="give a jax.extend.core.Primitive, the name of one, of a Pallas kernel"
            " or of an FFI target.",
        )
    _check_rule_arguments(name, rule, reducers, flops, traits)
    if traits is not None:
        _TRAITS[name] = traits
    if not isinstance(rule, str):
        _RULES[name] = rule
        _USER_RULES.add(name)
        return
    try:
        check_text(rule)
    except ValueError as error:
        raise RuleError(
            f"`register_rule({name!r}, …)`: {error}.",
            where=repr(rule),
            fix="write operands '->' results, as 'b s d, d f -> b s f'.",
        ) from None
    text = rule

    def from_text(ctx: OpContext) -> OpRule:
        try:
            parsed = parse_rule(text, ctx.in_shapes, ctx.out_shapes, reducers=reducers)
        except ValueError as error:
            raise RuleError(
                f"the rule registered for `{name}` does not fit this call: {error}.",
                where=repr(text),
                numbers=f"operands {ctx.in_shapes}, results {ctx.out_shapes}",
                fix=f"register a function: register_rule({name!r}, fn).",
            ) from None
        work = flops(ctx) if flops else 0.0
        # An elementwise op is computed in its readers; a kernel is not.
        is_fusible = ctx.primitive == name and traits_of(name).is_elementwise
        return OpRule(parsed, work, is_fusible)

    _RULES[name] = from_text
    _USER_RULES.add(name)


def _check_rule_arguments(
    name: str, rule: Any, reducers: Any, flops: Any, traits: Any
) -> None:
    """Refuse arguments of `register_rule` that have the wrong type.

    Raises:
      RuleError: names the first of them.
    """
    is_text = isinstance(rule, str)
    is_mapping = isinstance(reducers, Mapping) and all(
        isinstance(k, str) and isinstance(v, str) and v in REDUCERS
        for k, v in reducers.items()
    )
    for is_fine, where, value, fix in (
        (is_text or callable(rule), "rule", rule, "write 'b s d, d f -> b s f'."),
        (
            reducers is None or (is_text and is_mapping),
            "reducers=",
            reducers,
            f"map factors of the text to {', '.join(REDUCERS)}.",
        ),
        (
            flops is None or (is_text and callable(flops)),
            "flops=",
            flops,
            "give a function of OpContext beside a text; a function has its own.",
        ),
        (
            traits is None or isinstance(traits, Traits),
            "traits=",
            traits,
            "give rhino.Traits, as rhino.Traits(rhino.OpKind.CONTRACTION).",
        ),
    ):
        if not is_fine:
            raise RuleError(
                f"`register_rule({name!r}, …)`: this cannot be read.",
                where=where,
                numbers=f"got {brief(value)} ({type(value).__name__})",
                fix=fix,
            )
