"""Logical names of dims, and rules that map the names to mesh axes.

Frameworks specify layouts in two steps: every array names its dims, and rules map each
name to mesh axes. The names here are those of dim classes (dims across the program that
are one index range); a class that is sharded in two ways has two names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
