"""Parts of the exported source that styles share; text for a mesh axis of stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from rhino_jax.export.constraints import Constraint, constraints_of
from rhino_jax.export.meshes import mesh_source
from rhino_jax.export.patch import Words, diff_of
from rhino_jax.export.pytrees import (
    Argument,
    LeafText,
    arguments_of,
    quoted,
    results_of,
    spec_text,
    tuple_text,
)
from rhino_jax.frontend.provenance import cell_of
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.spec import axes_text
from rhino_jax.ir.traits import OpKind
from rhino_jax.ir.transform import FORMS
from rhino_jax.passes.apply import apply_passes
from rhino_jax.plan.decisions import held_specs
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.plan.trees import donated_arguments
from rhino_jax.runtime.constraints import spec_on_mesh
from rhino_jax.runtime.indexing import writes_one_index
from rhino_jax.runtime.ops_on_shards import needs_shards


FUNCTIONS = '''

def shardings(specs):
    """Specs as shardings over `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )


def jit(fn, *args):
    """`fn` as `jax.jit` with these layouts; `args`: arrays or ShapeDtypeStructs.

    Trace, compile and call it inside of `with jax.set_mesh(mesh):`.
    """
    return jax.jit(
        {called},
        in_shardings=shardings(in_specs(*args)),
        out_shardings=shardings(out_specs({result})),
        donate_argnums=DONATED,
    )
'''


PLACE = '''

def place(thing, specs):
    """A Flax NNX object, or arrays, where these layouts want it.

    `place(model, MODEL)`, …; then call `nnx.jit(step)` in `with jax.set_mesh(mesh):`.
    """
    from flax import nnx

    is_object = isinstance(thing, (nnx.Module, nnx.Optimizer))
    arrays, tree = jax.tree.flatten(nnx.state(thing) if is_object else thing)
    specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]
    placed = jax.tree.unflatten(tree, placed)
    if not is_object:
        return placed
    nnx.update(thing, placed)
    return thing
'''
"""Source that replaces `jit` if objects among the arguments change."""


@dataclass(frozen=True)
class Subject:
    """A plan to be exported.

    Attributes:
      plan: a plan of one mesh.
      traced: its function, as the user wrote it; None for a plan that was read from a
        file.
    """

    plan: PlanData
    traced: Traced | None

    @cached_property
    def running(self) -> Traced:
        """The function after the plan's program passes, as decisions see it."""
        assert self.traced is not None
        return apply_passes(self.traced, self.plan.transforms)

    @property
    def has_objects(self) -> bool:
        """Whether objects among the arguments change, which `jax.jit` would lose."""
        return self.traced is not None and self.traced.written is not None

    @cached_property
    def constraints(self) -> list[Constraint]:
        if self.traced is None:
            return []
        sizes = [size for _, size in self.plan.mesh_axes]
        return constraints_of(self.running, self.plan.decisions, sizes)

    def spec(self, spec: Sequence[tuple[int, ...]], shape: Sequence[int]) -> str:
        """Return a spec as source, equal to rhino's own annotation."""
        return spec_text(self.partition_spec(spec, shape))

    def partition_spec(
        self, spec: Sequence[tuple[int, ...]], shape: Sequence[int]
    ) -> PartitionSpec:
        names, sizes = zip(*self.plan.mesh_axes, strict=True)
        kinds = (AxisType.Auto,) * len(names)
        mesh = AbstractMesh(sizes, names, axis_types=kinds)
        return spec_on_mesh(tuple(spec), shape, mesh)

    def leaf(self, leaf: Leaf) -> str:
        return self.spec(leaf.spec, leaf.shape)


def head(
    subject: Subject, style: str, says: Sequence[str], imports: str, kind: str = "Auto"
) -> str:
    """Return docstring, imports and mesh of the exported module.

    Args:
      subject: the plan.
      style: name of the style.
      says: sentences for the docstring.
      imports: lines of imports.
      kind: type of the mesh axes.
    """
    plan = subject.plan
    axes = axes_text(plan.mesh_axes)
    page = "\n\n".join(
        [f"`{plan.program_name}` over {axes}: a plan of rhino_jax, style {style!r}."]
        + [f"- {line}" for line in (*says, *_losses(subject))]
    )
    page = page.replace("\n\n- ", "\n- ").replace("\n- ", "\n\n- ", 1)
    more, mesh = mesh_source(plan, kind)
    return (
        f'r"""{page}\n"""\n\n{imports}{more}'
        "from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P\n\n"
        f"{mesh}"
    )


def _guarded(subject: Subject) -> list[str]:
    """Return sentences on ops that XLA's partitioner may compute wrongly, which the
    plan itself runs on shards or behind a barrier."""
    if subject.traced is None:
        return []
    decisions, program = subject.plan.decisions, subject.running.program
    sizes = [size for _, size in subject.plan.mesh_axes]
    convolutions: dict[str, None] = {}
    writes: dict[str, None] = {}
    for op in program.ops:
        kind = op.traits.kind
        if op.rule is None or kind not in (OpKind.CONVOLUTION, OpKind.SCATTER):
            continue
        specs = held_specs(op, decisions)
        if kind is OpKind.CONVOLUTION:
            if needs_shards(op, specs):
                convolutions[str(op.source)] = None
        elif writes_one_index(op, program.values[op.operands[1]].shape, specs, sizes):
            writes[str(op.source)] = None
    found = []
    if convolutions:
        found.append(
            "NOT here: convolutions whose windows are sharded, or of several groups,"
            " which the plan runs in `shard_map`. XLA's partitioner may compute them"
            " and their gradients wrongly from these layouts: lay out their images by"
            f" batch alone, or run the plan itself ({', '.join(convolutions)})."
        )
    if writes:
        found.append(
            "NOT here: barriers before writes at one index of a sharded dim, without"
            " which XLA may write other elements (openxla/xla#49121): put the array"
            " through `jax.lax.optimization_barrier`, or run the plan itself"
            f" ({', '.join(writes)})."
        )
    return found


def _losses(subject: Subject) -> list[str]:
    """Return sentences on parts of the plan that no style can express."""
    plan, lost = subject.plan, _guarded(subject)
    has_groups = subject.traced is not None and any(
        op.traits.is_tiled for op in subject.running.program.ops
    )
    if has_groups and plan.stages[0].decisions.lowering.tiles_groups:
        lost.append(
            "NOT here: rhino's kernel of grouped matmuls; as it is written, XLA:GPU"
            " multiplies every group with all rows, and holds masked copies of them."
        )
    if subject.has_objects:
        lost.append(
            "NOT here: layouts of results: what is written back to objects is laid out"
            " as the compiler likes; `place` says where they start."
        )
    for t in plan.transforms:
        if t.name == FORMS:
            lost += [
                f"NOT here: form {form!r} of the calls {key}; name it first in"
                " `rhino.choose`, and it runs."
                for key, form in t.chosen.items()
            ]
        elif t.choice:
            lost.append(
                f"NOT here: the plan's pass {t.name!r}, which rewrites the program;"
                " `plan.jit` does it, and moves and holds other bytes."
            )
    if plan.microbatches > 1:
        lost.append(
            f"NOT here: {plan.microbatches} micro-batches; the step needs more memory."
        )
    return lost


def layouts(subject: Subject, text: LeafText | None = None, wrap: str = "{}") -> str:
    """Return source with the specs of every argument and the result, and its functions.

    Args:
      subject: the plan.
      text: source of an array's spec; None: its PartitionSpec.
      wrap: expression that converts a tree of these texts to specs.
    """
    text = text or subject.leaf
    arguments, keywords = arguments_of(subject.plan, text)
    results, is_tuple = results_of(subject.plan, text)
    known = {(a.is_list, a.leaves): a for a in arguments if len(a.leaves) > 1}
    held = [known.get((r.is_list, r.leaves), r) for r in results]
    parts = ["# How arguments are laid out, and the result."]
    written = [*arguments, *(r for r in held if r not in arguments)]
    called = [_free_name(a.name, _USED) for a in arguments]
    constants: dict[str, str] = {}
    for a in written:
        taken = {*_CONSTANTS, *called, *constants.values()}
        constants[a.name] = _free_name(a.name.upper(), taken)
    for a in written:
        if a.is_list:
            parts.append(f"# In the order of `jax.tree.leaves({a.name})`:")
        if a.has_statics:
            parts.append("# None: no array; bind it (`functools.partial`) first.")
        parts.append(f"{constants[a.name]} = {a.text}")
    names = [a.name for a in arguments]
    given = donated_arguments(subject.plan)
    donated = [names.index(d) if isinstance(d, str) else d for d in given]
    parts.append(f"DONATED = {tuple_text(map(str, donated))}")
    specs = [
        wrap.format(_specs(a, constants[a.name], name))
        for a, name in zip(arguments, called, strict=True)
    ]
    made = [
        wrap.format(
            _specs(a, constants[a.name], f"result[{i}]" if is_tuple else "result")
        )
        for i, a in enumerate(held)
    ]
    parts.append(
        f"\n\ndef in_specs({', '.join(called)}):\n"
        '    """Specs shaped like the arguments."""\n'
        f"    return {tuple_text(specs)}\n"
        "\n\ndef out_specs(result):\n"
        '    """Specs shaped like the result."""\n'
        f"    return {tuple_text(made) if is_tuple else made[0]}\n"
    )
    return "\n".join(parts) + (
        PLACE if subject.has_objects else _functions(called, keywords)
    )


_USED = frozenset({"fn", "jax", "nn", "to_mesh"})
"""Names that the bodies of functions of arguments read."""

_CONSTANTS = frozenset(
    {"CONSTRAINTS", "COTANGENTS", "COUNT", "DONATED", "P", "PATCH", "RULES"}
)
"""Names of modules that are written, but for the layouts."""


def _free_name(name: str, taken: Collection[str]) -> str:
    """Return the name, with underscores at its end until it is not taken."""
    while name in taken:
        name += "_"
    return name


def _functions(given: list[str], keywords: list[str]) -> str:
    called = out = "fn"
    if keywords:
        first = len(given) - len(keywords)
        named = zip(keywords, given[first:], strict=True)
        passed = [*given[:first], *(f"{k}={name}" for k, name in named)]
        called = f"lambda {', '.join(given)}: fn({', '.join(passed)})"
        out = f"({called})"
    result = f"jax.eval_shape({out}, *args)"
    return FUNCTIONS.replace("{called}", called).replace("{result}", result)


def _specs(argument: Argument, constant: str, of: str) -> str:
    if not argument.is_list:
        return constant
    return f"jax.tree.unflatten(jax.tree.structure({of}), {constant})"


def at_lines(subject: Subject, words: Words) -> str:
    """Return the constraints as a list, and as a diff of the user's files."""
    rows: list[str] = []
    back: list[str] = []
    apart: list[str] = []
    for c in subject.constraints:
        where = f"{cell_of(c.file).rsplit('/', 1)[-1]}:{c.line}"
        row = f"    ({quoted(where)}, {quoted(c.text)}, "
        if c.forward:
            said = words.layout(c, c.forward[-1])
            (apart if c.others else rows).append(f"{row}{said}),")
        if c.backward and not c.others:
            back.append(f"{row}{words.layout(c, c.backward[-1])}),")
    diff = diff_of(subject.constraints, words)
    parts = [
        "# At the lines of the program: expression, and how its value is laid out.",
        "CONSTRAINTS = [",
        *rows,
        "]",
    ]
    if apart:
        parts.append(
            "# Left to the compiler: laid out in several ways, by where it is called."
        )
        parts += [f"#{row}" for row in apart]
    if back:
        parts.append(
            "# Likewise of cotangents, where they are not laid out as the value."
        )
        parts += ["COTANGENTS = [", *back, "]"]
    parts.append(
        "# The same as a diff: `patch -p1 < file`, from the folder of the plan."
    )
    parts.append(f"PATCH = {_long(diff)}")
    return "\n".join(parts) + "\n"


def _long(text: str) -> str:
    if '"""' not in text and not text.endswith('"'):
        return f'r"""\\\n{text}"""'.replace('r"""\\\n', 'r"""', 1)
    if "'''" not in text:
        return f"r'''{text}'''"
    lines = "\n".join(f"    {line!r}" for line in text.splitlines(keepends=True))
    return f"(\n{lines}\n)"


PIPELINED = '''

COUNT = {count}  # micro-batches


def pipelined(layer, stacks, x):
    """`jax.lax.scan(layer, x, stacks)[0]`, its layers over `stage`, in micro-batches.

    For the loop over layers of a step that is jitted as above; `jax.grad` goes through.

    Args:
      layer: (x, weights of one layer) -> (x, None); rows of x do not meet in it.
      stacks: weights [layers, ...], cut over `stage`.
      x: [rows, ...].
    """
    stages = mesh.shape["stage"]

    def on_stage(stacks, rows):
        stage = jax.lax.axis_index("stage")

        def tick(received, t):
            own = rows[jax.numpy.clip(t - stage, 0, COUNT - 1)]
            y, _ = jax.lax.scan(
                layer, jax.numpy.where(stage == 0, own, received), stacks
            )
            to = [(i, i + 1) for i in range(stages - 1)]
            return jax.lax.ppermute(y, "stage", to), y

        ticks = jax.numpy.arange(COUNT + stages - 1)
        _, made = jax.lax.scan(tick, jax.numpy.zeros_like(rows[0]), ticks)
        ends = made[stages - 1 :]  # of the last stage
        return jax.lax.psum(jax.numpy.where(stage == stages - 1, ends, 0), "stage")

    rows = x.reshape(COUNT, -1, *x.shape[1:])
    run = jax.shard_map(
        on_stage,
        mesh=mesh,
        axis_names={"stage"},
        in_specs=(P("stage"), P()),
        out_specs=P(),
        check_vma=False,
    )
    return run(stacks, rows).reshape(x.shape)
'''
"""Source of a pipelined loop over layers, as a user would write it.

Source: GPipe (arXiv 1811.06965) as an SPMD pipeline: `shard_map` and `ppermute`.
"""


def stages_text(plan: PlanData) -> tuple[str, ...]:
    """Return sentences on the layers and tasks of each stage; empty for other plans."""
    if not plan.is_one_program:
        return ()
    places = dict(plan.mesh_axes)
    others = [f"`{n}`" for n in places if n != STAGE_AXIS and places[n] > 1]
    held = "; ".join(
        f"stage {i}: layers "
        + " and ".join(f"{a} to {b - 1}" for a, b in stage.layers)
        + f" on {len(stage.devices)} device{'s' if len(stage.devices) > 1 else ''}"
        for i, stage in enumerate(plan.stages)
    )
    beside = f", sharded over {', '.join(others)} as below" if others else ""
    ticks = plan.microbatches + plan.num_stages - 1
    return (
        f"stages are places along `{STAGE_AXIS}`: {held}; by dim 0 of stacks of layers."
        f" What is in no layer lies on all stages{beside}.",
        f"a step takes {ticks} ticks forward and as many back: on tick t, stage s does"
        f" its layers for micro-batch t - s of {plan.microbatches}, and sends what"
        " they make. `pipelined` below does that for a loop over layers: put it in"
        " place of the `lax.scan`. Without it `jit` makes no pipeline.",
        "NOT here: what the plan does beyond: it shares what is in no layer among"
        " stages, which compute all of it with `pipelined`, and chooses what the"
        " backward pass recomputes.",
    )


def pipelined(plan: PlanData) -> str:
    """Return the source of a loop over layers in stages; empty for other plans."""
    if not plan.is_one_program:
        return ""
    return PIPELINED.replace("{count}", str(plan.microbatches))
