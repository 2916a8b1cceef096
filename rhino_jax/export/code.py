"""Plans as Python source: `plan.code`, and `audit.patch`.

Each style of `plan.code` is one function, from a plan to a module's text.

Frameworks specify layouts in two steps: every array names its dims, and rules map each
name to mesh axes. The names here are those of dim classes (dims across the program that
are one index range); a class that is sharded in two ways has two names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rhino_jax.errors import PlanFileError, RhinoError, nearest
from rhino_jax.export.constraints import Constraint
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
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.plan import Leaf, PlanData


WORDS = (
    (re.compile(r"expert|moe", re.I), "expert"),
    (re.compile(r"vocab|embed.*\b0$|head.*\b1$", re.I), "vocab"),
    (re.compile(r"attn|attention|qkv|\b[qkv]\b", re.I), "heads"),
    (re.compile(r"mlp|ffn?|gate|up|down|wi|wo", re.I), "mlp"),
    (re.compile(r"conv|kernel", re.I), "channels"),
)
"""Pattern of a path and a dim of it, as `params['embed'] 0` → the usual name."""

Word = tuple[str, str]
"""Name of a dim, and the path of the first one of its kind."""

Classes = Callable[[int], Sequence[int | None]]
"""Value → the class of every dim."""


@dataclass(slots=True)
class DimNames:
    """Names of dims, assigned on first use.

    Attributes:
      axes: names of the mesh axes.
      classes: see `Classes`.
      words: class → its name, and the path of the first of its kind: dims of repeated
        layers that are written one after the other share names.
      rules: name → mesh axes, in the order in which names were assigned.
    """

    axes: Sequence[str]
    classes: Classes
    words: Mapping[int, Word]
    rules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _given: dict[tuple[Word, tuple[int, ...]], str] = field(default_factory=dict)

    def of(self, value: int, spec: Spec) -> tuple[str | None, ...]:
        """Return the name of every dim of a value.

        None for dims without a class that are not sharded.
        """
        classes = self.classes(value)
        if len(classes) != len(spec):
            classes = [None] * len(spec)
        found: list[str | None] = []
        for dim, cut in zip(classes, spec, strict=True):
            name = self._name(dim, cut)
            # A name may occur only once in an array.
            found.append(None if name in found and not cut else name)
        return tuple(found)

    def _name(self, dim: int | None, cut: tuple[int, ...]) -> str | None:
        axes = tuple(self.axes[a] for a in cut)
        if dim is None or dim not in self.words:
            return None if not cut else self._new((f"over_{'_'.join(axes)}", ""), cut)
        return self._new(self.words[dim], cut)

    def _new(self, word: Word, cut: tuple[int, ...]) -> str:
        name = self._given.get((word, cut))
        if name is None:
            name, n = word[0], 2
            while name in self.rules:
                name, n = f"{word[0]}_{n}", n + 1
            self._given[word, cut] = name
            self.rules[name] = tuple(self.axes[a] for a in cut)
        return name


def names_of(plan: PlanData, traced: Traced) -> DimNames:
    """Return the names for the dims of a plan's program."""
    # The search has imported these; code that only reads plans need not import them.
    from rhino_jax.analysis.dim_classes import find_dim_classes
    from rhino_jax.analysis.inline_regions import inline_regions
    from rhino_jax.analysis.roles import find_roles

    graph = inline_regions(traced.program)
    found = find_dim_classes(graph)
    roles = find_roles(graph, found)
    classes: dict[int, list[int | None]] = {}
    for node in graph.nodes:
        if node.op is not None and node.op.rule is not None:
            for i, value in enumerate(node.op.results):
                classes.setdefault(value, found.results(node, i))
        elif node.value is not None:
            classes.setdefault(node.value, found.results(node, 0))
    words: dict[int, Word] = {c: ("sequence", "") for c in roles.sequence}
    words.update((c, ("batch", "")) for c in roles.batch)
    _call_by_paths(traced, classes, words)
    axes = [name for name, _ in plan.mesh_axes]
    return DimNames(axes, lambda value: classes.get(value, ()), words)


def _call_by_paths(
    traced: Traced, classes: Mapping[int, Sequence[int | None]], words: dict[int, Word]
) -> None:
    """Name the classes of arguments' dims after their paths.

    The class with the most arrays, the model's width, is "embed".

    Args:
      traced: the function.
      classes: value → the class of every dim.
      words: class → name; extended in place.
    """
    places: dict[int, list[str]] = {}
    for entry in traced.program.inputs:
        for dim, found in enumerate(classes.get(entry.value, ())):
            if found is not None and found not in words:
                places.setdefault(found, []).append(f"{entry.path} {dim}")
    ordered = sorted(places.items(), key=lambda item: (-len(item[1]), item[0]))
    for rank, (found, where) in enumerate(ordered):
        alike = re.sub(r"\[\d+\]", "[*]", where[0])
        words[found] = ("embed", "") if not rank else (_word(where), alike)


def _word(where: Sequence[str]) -> str:
    for pattern, word in WORDS:
        if pattern.search(where[0]):
            return word
    key = re.findall(r"[A-Za-z_]\w*", where[0])
    return f"{key[-1]}_{where[0].rpartition(' ')[2]}" if key else "dim"


def leaf_values(traced: Traced, plan: PlanData) -> Callable[[Leaf], int]:
    """Return a function from a plan's argument or result to its value id."""
    found = {
        id(leaf): entry.value
        for leaf, entry in zip(plan.inputs, traced.program.inputs, strict=True)
    }
    found.update(
        (id(leaf), entry.value)
        for leaf, entry in zip(plan.outputs, traced.program.outputs, strict=True)
    )
    return lambda leaf: found[id(leaf)]


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
    hosted = [leaf.path for leaf in (*plan.inputs, *plan.outputs) if leaf.on_host]
    if hosted:
        raise RhinoError(
            f"{what}: arrays are in the host's memory, which no spec says.",
            where=f"the plan of `{plan.program_name}`, `{hosted[0]}`",
            numbers=f"{len(hosted)} arrays",
            fix="plan.jit(fn) runs it; or plan with offload='as written'.",
        )
    if plan.in_tree is None or (plan.traced is None and style != SPECS):
        raise PlanFileError(
            f"{what}: the program's lines are not known.",
            where=f"the plan of `{plan.program_name}`, read from a file",
            numbers="style 'specs' does without them",
            fix="plan.jit(fn).plan(*args).code(style): the same plan, of your lines.",
        )
    return STYLES[style](Subject(plan, plan.traced))
