"""Plans as Python source: `plan.code`, and `audit.patch`.

Each style of `plan.code` is one function, from a plan to a module's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from rhino_jax.errors import PlanFileError, RhinoError, nearest
from rhino_jax.export.constraints import Constraint
from rhino_jax.export.logical import DimNames, leaf_values, names_of
from rhino_jax.export.parts import (
    Subject,
    at_lines,
    head,
    layouts,
    pipelined,
    stages_text,
)
from rhino_jax.export.patch import Words, diff_of
from rhino_jax.export.pytrees import quoted
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.plan import PlanData


JAX = "import jax\n"

INSIDE = (
    "inside of the step, what the compiler propagates from arguments and results;"
    " style 'constraints' says more."
)
AT_LINES = (
    "values inside are held as PATCH says, once it is applied; cotangents as their"
    " values, but for COTANGENTS; what the optimizer adds follows from them and from"
    " the arguments."
)
MORE = (
    "NOT here: layouts of values within one expression; those of a line that is met"
    " several times and laid out otherwise each time (they stand below as comments);"
    " and that the backward pass reads an operand as it was before the forward pass"
    " moved it."
)


def specs(subject: Subject) -> str:
    """Return specs of arguments and results, and `jax.jit` with them."""
    says = (INSIDE, *stages_text(subject.plan))
    body = layouts(subject) + pipelined(subject.plan)
    return f"{head(subject, 'specs', says, JAX)}\n{body}"


def constraints(subject: Subject) -> str:
    """Return the style `specs`, with `with_sharding_constraint` at the user's lines."""
    first = head(subject, "constraints", (AT_LINES, MORE), JAX)
    return _module(subject, constrained(subject), first, layouts(subject))


def _module(subject: Subject, words: Words, *parts: str) -> str:
    """Return a module of these parts, with the constraints at the user's lines."""
    return "\n".join([*parts, "", at_lines(subject, words)])


def constrained(subject: Subject) -> Words:
    """Return the notation of constraints in JAX."""

    def layout(c: Constraint, spec: Spec) -> str:
        return f"jax.{subject.spec(spec, c.shape).replace('P.', 'jax.P.')}"

    return Words("jax.lax.with_sharding_constraint", layout, JAX.strip())


def explicit(subject: Subject) -> str:
    """Return sharding in types: over Explicit axes, `jax.typeof` shows layouts."""
    says = (
        "arguments and results have these layouts in their types (mesh axes are"
        " Explicit): `jax.typeof(x)` says them, and another layout is an error.",
        "the step itself runs under `jax.sharding.auto_axes`: in a fully explicit one"
        " every contraction over a sharded dim needs `out_sharding=`, the specs of"
        " which stand in CONSTRAINTS.",
        AT_LINES,
        MORE,
    )
    body, mark, jit = layouts(subject).partition(_JIT_HEAD)
    if not mark:
        raise RhinoError(
            "`plan.code('explicit')`: objects among the arguments change, which types"
            " do not say.",
            where=f"the plan of `{subject.plan.program_name}`",
            fix="use style 'nnx'.",
        )
    called, result = _CALLED.search(jit), _RESULT.search(jit)
    assert called is not None and result is not None
    wrapped = _EXPLICIT_HEAD.format(called=called[1], result=result[1])
    jit = jit.replace(called[0], "        fn,\n", 1)
    jit = jit.replace(result[0], "out_shardings=out_shardings,\n", 1)
    body = f"{body}{wrapped}{jit}"
    first = head(subject, "explicit", says, JAX, "Explicit") + _INSIDE
    return _module(subject, constrained(subject), first, body, _EXPLICIT)


_JIT_HEAD = "    return jax.jit(\n"
_EXPLICIT_HEAD = """    with jax.set_mesh(inside):
        out_shardings = shardings(out_specs({result}))
    fn = jax.sharding.auto_axes(
        {called}, axes=mesh.axis_names, out_sharding=out_shardings
    )
    return jax.jit(
"""
_CALLED = re.compile(r"^        (.*),\n")
_RESULT = re.compile(r"out_shardings=shardings\(out_specs\((.*)\)\),\n")
_INSIDE = """inside = Mesh(  # the same, as the step itself sees it
    mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
)
"""
_EXPLICIT = '''
def typed(*args):
    """The arguments as ShapeDtypeStructs whose types have the layouts."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        args,
        shardings(in_specs(*args)),
    )


def placed(*args):
    """The arguments as arrays with the layouts: `jax.sharding.reshard` of each."""
    return jax.tree.map(jax.sharding.reshard, args, shardings(in_specs(*args)))
'''


def linen(subject: Subject) -> str:
    """Return logical axis rules of Flax Linen."""
    says = (
        "every array names its dims, RULES say over which mesh axes they are sharded."
        " In modules: `nn.with_logical_partitioning(init, names)`, with the names of"
        " the trees below; activations: `nn.with_logical_constraint`, as in PATCH.",
        AT_LINES,
        MORE,
    )
    names, text = _logical(subject)
    body = layouts(subject, text, "nn.logical_to_mesh({}, RULES)")
    first = head(subject, "linen", says, "import flax.linen as nn\nimport jax\n")
    return _module(subject, _named(names), first, _rules(names), body)


def nnx(subject: Subject) -> str:
    """Return logical axis rules of Flax NNX."""
    says = (
        "every array names its dims, RULES say over which mesh axes they are sharded."
        " In modules: `nnx.with_partitioning(init, names)`, with the names of the trees"
        " below, made inside of `nnx.logical_axis_rules(RULES)`; of a model that"
        " exists, `annotate(model, tree)` sets the same.",
        AT_LINES,
        MORE,
    )
    names, text = _logical(subject)
    body = layouts(subject, text, "to_mesh({})")
    first = head(subject, "nnx", says, "from flax import nnx\nimport jax\n")
    rules = _rules(names), _TO_MESH.format(rules="dict(RULES)"), _ANNOTATE
    return _module(subject, constrained(subject), first, *rules, body)


_TO_MESH = '''
def to_mesh(names):
    """Specs over mesh axes of a tree of names of dims."""
    axes = {rules}
    return jax.tree.map(
        lambda spec: P(*(axes.get(name) for name in spec)),
        names,
        is_leaf=lambda x: isinstance(x, P),
    )
'''
_ANNOTATE = '''
def annotate(model, names):
    """Tell the variables of a model the names of their dims, in order."""
    variables = jax.tree.leaves(
        nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    specs = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, P))
    for variable, spec in zip(variables, specs, strict=True):
        variable.set_metadata(out_sharding=tuple(spec))
'''


def maxtext(subject: Subject) -> str:
    """Return MaxText's `logical_axis_rules`."""
    says = (
        "`logical_axis_rules` is Python and YAML: paste it into a MaxText config. Its"
        " names are rhino's for the dims of this program; where your model has others"
        " (as `activation_batch`), rename them.",
        "NOT here: mesh axes have the plan's names; MaxText's meshes have `data`,"
        " `fsdp`, `tensor` and others, so rename these too.",
        "weights and optimizer state that one name lays out in two ways have two names"
        " (`embed`, `embed_2`): MaxText has one, so change the model's annotation.",
    )
    names, text = _logical(subject)
    body = layouts(subject, text, "to_mesh({})")
    rules = ",\n".join(
        f"  [{json.dumps(name)}, {json.dumps(list(axes))}]"
        for name, axes in names.rules.items()
    )
    to_mesh = _TO_MESH.format(
        rules="{n: tuple(a) or None for n, a in logical_axis_rules}"
    )
    first = head(subject, "maxtext", says, JAX)
    rules = f"logical_axis_rules = [\n{rules}\n]"
    return _module(subject, _named(names), first, rules, to_mesh, body)


def _logical(subject: Subject) -> tuple[DimNames, Callable[..., str]]:
    """Return names of all dims, and a function from an array to their source.

    All names are assigned before, so that the rules are complete.
    """
    traced = subject.running
    names = names_of(subject.plan, traced)
    value = leaf_values(traced, subject.plan)

    def text(leaf: object) -> str:
        return _names_text(names.of(value(leaf), leaf.spec), "P")  # type: ignore

    layouts(subject, text)
    for c in subject.constraints:
        for spec in (*c.forward, *(c.backward or ())):
            names.of(c.value, spec)
    return names, text


def _names_text(found: tuple[str | None, ...], word: str) -> str:
    parts = ", ".join("None" if n is None else quoted(n) for n in found)
    return f"{word}({parts})" if word else f"({parts}{',' if len(found) == 1 else ''})"


def _named(names: DimNames) -> Words:
    def layout(c: Constraint, spec: Spec) -> str:
        return _names_text(names.of(c.value, spec), "")

    return Words("flax.linen.with_logical_constraint", layout, "import flax.linen")


def _rules(names: DimNames) -> str:
    rows = []
    for name, axes in names.rules.items():
        said = "None" if not axes else quoted(axes[0])
        if len(axes) > 1:
            said = f"({', '.join(map(quoted, axes))})"
        rows.append(f"    ({quoted(name)}, {said}),")
    return "\n".join(["RULES = (", *rows, ")"])


STYLES: Mapping[str, Callable[[Subject], str]] = {
    "specs": specs,
    "constraints": constraints,
    "nnx": nnx,
    "linen": linen,
    "maxtext": maxtext,
    "explicit": explicit,
}
"""Style → function that writes it."""


SPECS = "specs"
"""The only style for plans in stages, which are SPMD pipelines."""


def patch_of(plan: PlanData) -> str:
    """Return a diff of the user's files that adds a plan's decisions as constraints.

    Existing constraints get the plan's specs. Empty if nothing changes, or the plan was
    not made in this process.
    """
    if plan.traced is None or not plan.is_one_mesh:
        return ""
    subject = Subject(plan, plan.traced)
    return diff_of(subject.constraints, constrained(subject))


def code_of(plan: PlanData, style: str) -> str:
    """Return a plan as the text of a Python module that does not need rhino.

    Args:
      plan: the plan.
      style: one of `STYLES`.

    Raises:
      RhinoError: no style has that name, or the plan has several stages.
      PlanFileError: the style refers to the program's lines, and the plan was read from
        a file.
    """
    what = f"`plan.code({style!r})`"
    if style not in STYLES:
        raise RhinoError(
            f"{what}: no style has that name.{nearest(style, STYLES)}",
            numbers=f"styles: {', '.join(STYLES)}",
            fix="use one of these.",
        )
    if not plan.is_one_mesh and not (plan.is_one_program and style == SPECS):
        fix = "plan.jit(fn) runs it; or plan with stages=1 and write that out."
        if plan.is_one_program:
            fix = f"take style {SPECS!r}, which says what stages hold; {fix}"
        raise RhinoError(
            f"{what}: the plan has stages, which no constraints say.",
            where=f"the plan of `{plan.program_name}`",
            numbers=f"{plan.num_stages} stages, schedule {plan.schedule!r}",
            fix=fix,
        )
    if plan.in_tree is None or (plan.traced is None and style != SPECS):
        raise PlanFileError(
            f"{what}: the program's lines are not known.",
            where=f"the plan of `{plan.program_name}`, read from a file",
            numbers="style 'specs' does without them",
            fix="plan.jit(fn).plan(*args).code(style): the same plan, of your lines.",
        )
    return STYLES[style](Subject(plan, plan.traced))
