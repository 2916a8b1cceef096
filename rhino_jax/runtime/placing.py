"""Place state as the plan requires: initialized, moved or loaded into its shardings."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax._compat import is_literal, without_dead_code
from rhino_jax.errors import RhinoError
from rhino_jax.frontend.leaves import Leaves, split_result
from rhino_jax.frontend.objects import nnx_graph
from rhino_jax.frontend.objects.held import is_held
from rhino_jax.frontend.parameters import check_callable
from rhino_jax.hardware.emulated import WATCHDOG
from rhino_jax.plan.plan import AnyPlan, Leaf, PlanData
from rhino_jax.plan.trees import in_tree_of, sharding_of, with_mesh
from rhino_jax.runtime.belonging import as_planned, leaves_for, of_equal_rank
from rhino_jax.runtime.meshes import can_run, make_mesh, not_runnable
from rhino_jax.runtime.processes import across
from rhino_jax.runtime.storage import (
    dims_of,
    in_order,
    other_order,
    remember,
    stored_arguments,
)
from rhino_jax.utils.progress import Progress


def abstract_args(plan: PlanData) -> Any:
    """Return the plan's arguments as shapes, sharded; see `PlanData.abstract_args`."""
    placed = with_some_mesh(plan, "`plan.abstract_args`")
    sharding = sharding_of(placed)

    def abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
        dtype = type_of(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding(leaf))

    tree = in_tree_of(placed, abstract)
    if plan.traced is None or not nnx_graph.is_imported():
        return tree
    arguments = plan.traced.arguments
    arrays = map(abstract, placed.inputs[: len(plan.in_leaf_positions)])
    args, kwargs = arguments.unflatten([*arrays])
    args_there, kwargs_there = tree if kwargs else (tree, {})

    def stated(x: Any, there: Any) -> Any:
        has_objects = any(map(is_held, jax.tree.leaves(x, is_leaf=is_held)))
        return nnx_graph.states_of(x) if has_objects else there

    whole = tuple(stated(*both) for both in zip(args, args_there, strict=True))
    named = {name: stated(x, kwargs_there[name]) for name, x in kwargs.items()}
    return (whole, named) if kwargs else whole


def put(plan: PlanData, tree: Any, *, local: bool, stored: bool = False) -> Any:
    """Move a pytree into the plan's shardings; see `PlanData.put`."""
    what = "`plan.put`"
    placed = _runnable(plan, what)
    every = _leaves(tree)
    leaves = every.without_scalars()
    for path, x in zip(leaves.array_paths, leaves.arrays, strict=True):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise RhinoError(
                f"{what}: a shape in place of an array.",
                where=path,
                numbers=str(x),
                fix="give arrays; plan.abstract_args() gives shapes with shardings.",
            )
    known = (_known_local if local else _known)(placed, every, what)
    shardings = [*map(sharding_of(placed), known)]
    dims = stored_arguments(placed)
    want = [dims.get(leaf.path, ()) for leaf in known]
    if local:
        # A process's rows in default order are not the rows that its devices store.
        for leaf, ordered in zip(known, want, strict=True):
            if ordered and not stored:
                raise RhinoError(
                    f"{what}: local=True, of an array that the plan stores in blocks.",
                    where=leaf.path,
                    numbers=f"{ordered[0][1]} along dim {ordered[0][0]}",
                    fix="give whole arrays, or with stored=True parts of what a step"
                    " gave.",
                )
        parts = zip(leaves.arrays, known, shardings, want, strict=True)
        made = [remember(_from_local(what, *each), w) for *each, w in parts]
        return _rebuilt(leaves, made)
    given, have = [], []
    for x, w in zip(leaves.arrays, want, strict=True):
        h = dims_of(x) or (w if stored else ())
        if not isinstance(x, jax.Array):
            # Reordered on the host; no device holds it twice.
            x, h = in_order(x, h, w), w
        given.append(x)
        have.append(h)
    orders = zip(across.placed(given, shardings), have, want, strict=True)
    return _rebuilt(leaves, [remember(in_order(x, h, w), w) for x, h, w in orders])


def as_written(plan: PlanData, tree: Any) -> Any:
    """Return a pytree in default storage order; see `PlanData.as_written`."""
    what = "`plan.as_written`"
    every = _leaves(tree)
    leaves, dims = every.without_scalars(), stored_arguments(plan)
    made = []
    known = _known(with_some_mesh(plan, what), every, what)
    for path, x, leaf in zip(leaves.array_paths, leaves.arrays, known, strict=True):
        have = dims_of(x)
        if not have and leaf.path in dims:
            raise other_order(what, path, have, dims[leaf.path])
        made.append(in_order(x, have, ()))
    return _rebuilt(leaves, made)


def _leaves(tree: Any) -> Leaves:
    """Return the leaves of a pytree, those of Flax NNX objects by the plan's names."""
    if nnx_graph.is_imported() and nnx_graph.has_objects(tree):
        tree = nnx_graph.split(tree, nnx_graph.new_references(), named=True)
    return split_result(tree)


def _known_local(plan: PlanData, every: Leaves, what: str) -> list[Leaf]:
    """Return the plan's leaf for each array, given as a process's local part."""
    sharding = sharding_of(plan)
    with contextlib.suppress(RhinoError):
        return _known(
            plan,
            every,
            what,
            as_planned,
            lambda leaf: local_shape_here(sharding(leaf), leaf.shape),
        )
    with contextlib.suppress(RhinoError):
        return _known(plan, every, what)
    return _known(plan, every, what, of_equal_rank)


def _known(
    plan: PlanData, every: Leaves, what: str, *kinds: Callable[..., Any]
) -> list[Leaf]:
    """Return the plan's leaf for each array.

    Python scalars, which go with any device, count for the structure; they may also be
    no arguments at all.

    Args:
      plan, every, what: as for `leaves_for`.
      kinds: `kind` and `shape_of` of `leaves_for`.
    """
    left = every.without_scalars().positions
    try:
        found = leaves_for(plan, every, what, *kinds)
    except RhinoError:
        if left == every.positions:
            raise
        return leaves_for(plan, every.without_scalars(), what, *kinds)
    return [leaf for leaf, p in zip(found, every.positions, strict=True) if p in left]


def _rebuilt(leaves: Leaves, arrays: Sequence[Any]) -> Any:
    """Return the pytree with these arrays; NNX objects are new ones."""
    tree = leaves.unflatten(arrays)
    if nnx_graph.is_imported():
        return nnx_graph.merge(tree, nnx_graph.new_objects())
    return tree


def _from_local(what: str, x: Any, leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    """Return a global array of this process's part of it."""
    wanted = local_shape_here(sharding, leaf.shape)
    shape = tuple(x.shape)
    if not across.here(sharding) and (0 in shape or shape == leaf.shape):
        # All of its shards are in other processes.
        return across.away(
            jax.ShapeDtypeStruct(leaf.shape, type_of(leaf.dtype)), sharding
        )
    if shape not in (wanted, leaf.shape):
        raise RhinoError(
            f"{what}: this process has another part of the array than the plan wants.",
            where=leaf.path,
            numbers=f"got {shape}; of {leaf.shape}, process {jax.process_index()} of"
            f" {jax.process_count()} holds {wanted}",
            fix="feed the rows of this process's devices: see"
            " jax.make_array_from_process_local_data.",
        )
    return jax.make_array_from_process_local_data(sharding, x, leaf.shape)


def local_shape_here(sharding: NamedSharding, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the union of this process's shards of an array."""
    places = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return tuple(
        sum(b - a for a, b in {i[dim].indices(size)[:2] for i in places if i})
        for dim, size in enumerate(shape)
    )


def init(
    plan: PlanData,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an init function into the plan's shardings; see `PlanData.init`."""
    what = "`plan.init`"
    check_callable(what, fn)
    placed = _runnable(plan, what)
    named = {name: _on_mesh(placed, x) for name, x in kwargs.items()}
    given, tree = jax.tree.flatten(([_on_mesh(placed, x) for x in args], named))
    # Sizes, configurations and functions are static; only arrays are traced.
    at = [i for i, x in enumerate(given) if hasattr(x, "shape") and hasattr(x, "dtype")]
    flat, results = on_arrays(fn, given, tree, at, _leaves)
    # An init function reads its arguments in default storage order.
    arrays = [in_order(given[i], dims_of(given[i]), ()) for i in at]
    shapes = jax.eval_shape(flat, *arrays)
    known = leaves_for(placed, results[-1].with_arrays(shapes), what)
    doing = f"initializing arguments of `{plan.program_name}`"
    with Progress(doing=doing, is_enabled=jax.process_index() == 0).ticking():
        made = _made_by_stages(placed, flat, arrays, known)
        if placed.mesh.devices.flat[0].platform == "cpu":
            with WATCHDOG.watching(lambda: what):  # see `SpmdExecutable`
                jax.block_until_ready(made)
    dims = stored_arguments(placed)
    made = [
        in_order(x, (), dims.get(leaf.path, ()))
        for x, leaf in zip(made, known, strict=True)
    ]
    return _rebuilt(results[-1], made)


def on_arrays(
    fn: Callable[..., Any],
    leaves: Sequence[Any],
    tree: Any,
    at: Sequence[int],
    split: Callable[[Any], Leaves],
) -> tuple[Callable[..., list[Any]], list[Leaves]]:
    """Return a function of the arrays of a call, with all other leaves as they are.

    Args:
      fn: a function of pytrees.
      leaves, tree: leaves and structure of its `(args, kwargs)`.
      at: positions of the arrays among the leaves.
      split: returns the leaves of a result.
    Returns:
      The function from arrays to the arrays of its result, and a list to which it adds
      the result's leaves when it is traced.
    """
    results: list[Leaves] = []

    def flat(*arrays: Any) -> list[Any]:
        everything = list(leaves)
        for i, x in zip(at, arrays, strict=True):
            everything[i] = x
        args, kwargs = jax.tree.unflatten(tree, everything)
        results.append(split(fn(*args, **kwargs)))
        return list(results[-1].arrays)

    return flat, results


def _made_by_stages(
    plan: PlanData,
    flat: Callable[..., list[Any]],
    arrays: Sequence[Any],
    known: Sequence[Leaf],
) -> list[Any]:
    """Return a function's results, each computed on the devices of its stages alone."""
    to_sharding = sharding_of(plan)
    found: list[Any] = [None] * len(known)
    places = defaultdict[tuple[int, int], list[int]](list)
    for i, leaf in enumerate(known):
        places[leaf.stage, leaf.num_stages].append(i)
    for _, mine in sorted(places.items()):

        def run(given: Sequence[Any], mine: Sequence[int] = mine) -> list[Any]:
            results = flat(*given)
            return [results[i] for i in mine]

        shardings = [to_sharding(known[i]) for i in mine]
        if plan.has_tasks:
            made = _made_on(run, arrays, shardings)
        else:
            made = jax.jit(run, out_shardings=shardings)(list(arrays))
        for i, x in zip(mine, made, strict=True):
            found[i] = x
    return found


def _made_on(
    run: Callable[[Sequence[Any]], list[Any]],
    arrays: Sequence[Any],
    shardings: Sequence[NamedSharding],
) -> list[Any]:
    """Return the results of a function on some of the devices.

    Only arguments that are really read are moved: an optimizer's state depends on no
    more than shapes.
    """
    closed = without_dead_code(jax.make_jaxpr(run)(list(arrays)))
    if not across.here(shardings[0]):
        return [*map(across.away, closed.out_avals, shardings)]
    readers = (eqn.invars for eqn in closed.jaxpr.eqns)
    atoms = itertools.chain(closed.jaxpr.outvars, *readers)
    read = {v for v in atoms if not is_literal(v)}
    at = [i for i, v in enumerate(closed.jaxpr.invars) if v in read]
    everywhere = NamedSharding(shardings[0].mesh, PartitionSpec())
    given = across.placed([arrays[i] for i in at], [everywhere] * len(at))

    def made_of(given: Sequence[Any]) -> list[Any]:
        # Arguments that are not read can be anything.
        everything: list[Any] = [None] * len(closed.jaxpr.invars)
        for i, x in zip(at, given, strict=True):
            everything[i] = x
        return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *everything))

    return list(jax.jit(made_of, out_shardings=list(shardings))(given))


def _on_mesh(plan: PlanData, argument: Any) -> Any:
    """Place an argument of the init function on the plan's mesh.

    In the plan's shardings where the plan has it (`params` of `optimizer.init`), or
    else replicated.
    """
    every = _leaves(argument)
    leaves = every.without_scalars()
    everywhere = set(plan.mesh.devices.flat)
    if not leaves.arrays or all(
        getattr(getattr(x, "sharding", None), "device_set", None) == everywhere
        for x in leaves.arrays
    ):
        return argument
    try:
        known = _known(plan, every, "`plan.init`")
    except RhinoError:
        shardings = [NamedSharding(plan.mesh, PartitionSpec())] * len(leaves.arrays)
    else:
        shardings = [*map(sharding_of(plan), known)]
    moved = across.placed(list(leaves.arrays), shardings)
    return _rebuilt(leaves, [*map(remember, moved, map(dims_of, leaves.arrays))])


def with_some_mesh(plan: AnyPlan, what: str) -> AnyPlan:
    """Return the plan with its mesh, or one of the present devices, as `plan.jit`."""
    if plan.mesh is not None:
        return plan
    return with_mesh(plan, make_mesh(plan.mesh_axes, what))


def _runnable(plan: PlanData, what: str) -> PlanData:
    """Return the plan with a mesh of real devices.

    Raises:
      MeshError: there are too few devices.
    """
    placed = with_some_mesh(plan, what)
    if not can_run(placed.mesh):
        raise not_runnable(placed)
    return placed


def type_of(dtype: str) -> Any:
    """Return the dtype that a plan's leaf names, also of PRNG keys."""
    if not dtype.startswith("key<"):
        return jax.numpy.dtype(dtype)
    impl = impl_of(dtype)
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def impl_of(dtype: str) -> str:
    """Return JAX's name of the PRNG implementation of a dtype such as `key<fry>`."""
    kinds = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
    return kinds[dtype[4:-1]]
