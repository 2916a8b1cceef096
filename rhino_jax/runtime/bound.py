"""One signature of a sharded function: traced, planned, on a mesh, ready to run.

`lower` gives it the interface of `jax.stages`: `Lowered` and `Compiled`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, compress, count
from typing import Any, Generic

import jax

from rhino_jax._compat import coordination_client, sharding_of_array
from rhino_jax.errors import TraceError
from rhino_jax.frontend.call import ArrayType, Signature, array_type
from rhino_jax.frontend.leaves import Static, is_python_scalar
from rhino_jax.frontend.objects.lift import Lifted, lift, merge_result
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.compile_only import compiler_options as needed_options
from rhino_jax.passes.apply import apply_passes
from rhino_jax.plan.plan import AnyPlan
from rhino_jax.runtime.buffers import Donations, Feedback, copied, unshared
from rhino_jax.runtime.meshes import not_runnable
from rhino_jax.runtime.processes.across import placed
from rhino_jax.runtime.processes.agree import processes_of_mesh
from rhino_jax.runtime.processes.running import Running
from rhino_jax.runtime.spmd import executable_of
from rhino_jax.runtime.storage import Storage


_AVAL, _SHARDING = map(operator.attrgetter, ("aval", "sharding"))


class Bound(Generic[AnyPlan]):
    """A traced function and its plan, on one mesh.

    Attributes:
      traced: the traced function, as its user wrote it.
      running: the traced function after the plan's passes; this one runs.
      plan: its plan.
      executable: runs the program.
      storage: storage order of arguments and results.
      mesh: the mesh of arguments and results, as the user made it: results have its
        axis types.
    """

    def __init__(self, traced: Traced, plan: AnyPlan, mesh: Any) -> None:
        self.traced, self.plan, self.mesh = traced, plan, mesh
        count = len(traced.arguments.positions)
        self.running = apply_passes(traced, plan.transforms)
        self.executable = executable_of(self.running, plan, mesh)
        self.storage = Storage.of(traced.program, plan)
        self.in_shardings = self.executable.in_shardings[:count]
        self.const_shardings = self.executable.in_shardings[count:]
        # Aval and sharding of each argument when it was last placed as planned, which
        # are compared at once: what takes 2 µs for an array takes ms for a thousand.
        self._seen: list[list[Any]] = [[()] * count for _ in range(2)]
        # Arrays of random keys have the public attribute alone.
        kinds = (str(dtype) for _, dtype, *_ in traced.signature.arrays)
        has_keys = any(kind.startswith("key<") for kind in kinds)
        self._sharding_of = _SHARDING if has_keys else sharding_of_array
        self._donations = Donations(
            traced.name, traced.arguments.array_paths, traced.donated
        )
        self._numbers: dict[int, tuple[Any, Any]] = {}
        self._only_arrays = not traced.arguments.statics
        self.feedback = Feedback(traced)
        owned = frozenset() if traced.written is None else traced.written.owned
        self._owned = [i for i in owned if traced.donated[i]]
        # Tasks of several stages coordinate processes themselves.
        processes = () if plan.has_tasks else processes_of_mesh(mesh)
        prefix = f"rhino_jax/run/{plan.fingerprint}"
        self._running = processes and Running(
            coordination_client(), processes, f"`{traced.name}`", prefix
        )

    def with_types(self, signature: Signature) -> Bound[AnyPlan]:
        """Return a copy, with its compiled programs, for other weak types.

        See `frontend.weak_types`; the signatures may differ in nothing else.
        """
        found = copy.copy(self)
        found.traced = replace(self.traced, signature=signature)
        found.executable = self.executable.for_types(self.abstract_arrays())
        found._seen = [[()] * len(column) for column in self._seen]
        return found

    @cached_property
    def consts(self) -> list[Any]:
        """Captured arrays without references, placed once as planned.

        Copies: the user may donate or delete the originals.
        """
        count = len(self.const_shardings) - len(self.traced.captured.references)
        if not count:
            return []
        with jax.ensure_compile_time_eval():
            return placed(
                [copied(x) for x in self.traced.consts[:count]],
                self.const_shardings[:count],
            )

    def held(self) -> list[Any]:
        """Return the current values of captured references, in the plan's shardings."""
        captured = self.traced.captured
        if not captured:
            return []
        values = unshared(captured.values(), captured.written)
        wanted = self.const_shardings[-len(values) :]
        held = [
            x if x.sharding == sharding and x.committed else placed([x], [sharding])[0]
            for x, sharding in zip(values, wanted, strict=True)
        ]
        captured.keep(values, held)
        return held

    def read(self, args: Any, kwargs: Any) -> Arguments | None:
        """Return the arrays of a call, or None if it is of another signature."""
        if self.traced.written is None:
            return self.match((args, kwargs))
        lifted = lift(args, kwargs, self.traced.written.has_states)
        if lifted is None:
            return None
        arguments = self.match((lifted.args, lifted.kwargs))
        lifted.forget()
        if arguments is not None:
            arguments.lifted = lifted
        return arguments

    def match(self, call: tuple[Any, Any]) -> Arguments | None:
        """Return the arrays of a call's `(args, kwargs)`, or None for another
        signature."""
        arguments = self.traced.arguments
        try:
            # Three quarters of the time of flattening and comparing: 1,000 keys of
            # dicts are not sorted.
            leaves = arguments.tree.flatten_up_to(call)
        except (TypeError, ValueError):
            return None
        if self._only_arrays:
            arrays = leaves
        else:
            for position, static in arguments.statics:
                if static != Static(leaves[position]):
                    return None
            arrays = [leaves[p] for p in arguments.positions]
        types = self._types(arrays)
        if types == self._seen:
            self._seen = types  # identical ones are compared at once
            return Arguments(arrays, [])
        to_move: list[int] = []
        for i in _others(types, self._seen):
            x, now = arrays[i], [column[i] for column in types]
            if now == [column[i] for column in self._seen]:
                continue
            if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct | jax.Ref):
                return None
            try:
                if not self._takes(i, array_type(x)):
                    return None
            except TypeError:
                return None
            if (
                isinstance(x, jax.Array)
                and x.sharding == self.in_shardings[i]
                and x.committed
            ):
                self._seen[0][i], self._seen[1][i] = now
            else:
                to_move.append(i)
        return Arguments(arrays, to_move)

    def _takes(self, argument: int, kind: ArrayType) -> bool:
        """Whether an argument may have a type: its own, on the host where the plan
        offloads it."""
        planned = self.traced.signature.arrays[argument]
        is_offloaded = self.plan.inputs[argument].on_host
        return kind == planned or (is_offloaded and kind[:-1] == planned[:-1])

    def _types(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """Return the arrays' avals and shardings; None where one has none."""
        try:
            return [list(map(get, arrays)) for get in (_AVAL, self._sharding_of)]
        except AttributeError:
            names = "aval", "sharding"
            return [[getattr(x, name, None) for x in arrays] for name in names]

    def place(self, arguments: Arguments) -> list[Any]:
        """Return the arrays in the plan's shardings; the user's own do not change."""
        arrays, to_move = arguments.arrays, arguments.to_move
        if arguments.lifted is not None:
            arrays = unshared(arrays, self._owned)
        if to_move:
            given, arrays = arrays, list(arrays)
            self._place_numbers(arrays, to_move)
            left = [i for i in to_move if arrays[i] is given[i]]
            if left:
                moved = placed(
                    [arrays[i] for i in left], [self.in_shardings[i] for i in left]
                )
                for i, array in zip(left, moved, strict=True):
                    arrays[i] = array
        return [*arrays, *self.consts, *self.held()]

    def _place_numbers(self, arrays: list[Any], to_move: Sequence[int]) -> None:
        """Replace Python numbers by arrays, of the dtype that they come back with.

        The array is reused as long as the number is the same.
        """
        for i in to_move:
            x = arrays[i]
            if not is_python_scalar(x):
                continue
            before, array = self._numbers.get(i, (None, None))
            is_same = type(before) is type(x) and repr(before) == repr(x)
            if not is_same or array.is_deleted():
                (array,) = placed([x], [self.in_shardings[i]])
                self._numbers[i] = x, array
            arrays[i] = array

    def run(self, arguments: Arguments, compiled: Any = None) -> Any:
        """Run on arrays; return the result as the function would."""
        if not self._running:
            return self._run(arguments, compiled)
        with self._running.step_of_one_program():
            return self._run(arguments, compiled)

    def _run(self, arguments: Arguments, compiled: Any) -> Any:
        if not self.executable.is_runnable:
            raise not_runnable(self.plan)
        self.storage.check(arguments.arrays)
        # On several devices of the CPU backend a deleted buffer ends the process.
        self._donations.check_alive(arguments.arrays)
        if arguments.lifted is None:
            self._donations.check(arguments.arrays, arguments.to_move)
        else:
            self._check_captured(arguments.lifted)
        arrays = self.place(arguments)
        if arguments.lifted is not None:
            self._donations.check(arrays)
        outs = self.executable.run(arrays, compiled)
        self._donations.made(outs)
        self.feedback.gave(outs)
        self.storage.gave(outs)
        if arguments.to_move and arguments.lifted is None:
            self._delete_donated(arguments, arrays, outs)
        return self._finish(arguments.lifted, arrays, outs)

    def _check_captured(self, lifted: Lifted) -> None:
        self.traced.captured.check(lifted.references, self.traced.name)

    def _finish(
        self, lifted: Lifted | None, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> Any:
        """Write back to captured references and the user's objects; return the result.

        Args:
          lifted: the objects among the arguments, or None.
          arrays: the arrays of the call.
          outs: results of the program.
        """
        outs, after = self.traced.captured.split(outs)
        self.traced.captured.write(after)
        if lifted is None:
            return self.result(outs)
        written = self.traced.written
        assert written is not None
        return lifted.finish(written, self._unflattened(outs), arrays, outs)

    def _delete_donated(
        self, arguments: Arguments, placed: Sequence[Any], outs: Sequence[Any]
    ) -> None:
        """Delete the originals of donated arrays that had to be moved.

        Only after the run: had anything failed before, the user would still have them.
        Not those that are returned unchanged: a moved array may share the original's
        buffer.
        """
        moved = [i for i in arguments.to_move if self.traced.donated[i]]
        returned = set(map(id, outs)) if moved else set()
        for i in moved:
            original = arguments.arrays[i]
            if (
                id(placed[i]) not in returned
                and isinstance(original, jax.Array)
                and not isinstance(placed[i], jax.core.Tracer)
                and not original.is_deleted()
            ):
                original.delete()

    def run_staged(self, arrays: Sequence[Any], lifted: Lifted | None) -> Any:
        """Run inside of an outer trace."""
        self.storage.check_no_trace()
        if lifted is not None:
            self._check_captured(lifted)
        outs = self.executable.run_staged([*arrays, *self.traced.consts])
        return self._finish(lifted, arrays, outs)

    def result(self, outs: Sequence[Any]) -> Any:
        """Unflatten the function's result from its flat arrays; writes nothing back."""
        result, written = self._unflattened(outs), self.traced.written
        if written is None:
            return result
        return merge_result(written, result, self.traced.arguments.arrays, outs)

    def _unflattened(self, outs: Sequence[Any]) -> Any:
        """Return the function's result; what follows in `outs` is written back."""
        result = self.traced.result
        outs = outs[: len(result.positions)]
        if result.statics:
            return result.unflatten(outs)
        return jax.tree.unflatten(result.tree, outs)

    def abstract_arrays(self) -> list[jax.ShapeDtypeStruct]:
        """Return types and shardings of arguments and constants."""
        types = [
            *self.traced.signature.arrays,
            *(array_type(c) for c in self.traced.consts),
        ]
        return [
            jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak, sharding=sharding)
            for (shape, dtype, is_weak, _), sharding in zip(
                types, [*self.in_shardings, *self.const_shardings], strict=True
            )
        ]


def _others(now: list[list[Any]], before: list[list[Any]]) -> list[int]:
    """Return the positions where columns do not hold the same objects."""
    differ = [a != b for a, b in zip(now, before, strict=True)]
    pairs = zip(compress(now, differ), compress(before, differ), strict=True)
    columns = [compress(count(), map(operator.is_not, *pair)) for pair in pairs]
    return sorted({*chain(*columns)})


class Arguments:
    """The arrays of one call, and which of them are not in the plan's shardings.

    Attributes:
      arrays: in the program's order.
      to_move: positions of the arrays that have to be moved.
      lifted: the objects among the arguments that are written back to, if any.
    """

    __slots__ = ("arrays", "lifted", "to_move")

    def __init__(self, arrays: list[Any], to_move: list[int]) -> None:
        self.arrays, self.to_move = arrays, to_move
        self.lifted: Lifted | None = None


class Lowered:
    """A sharded function, lowered for one signature.

    Everything that `jax.stages.Lowered` has is here too (`as_text`,
    `compiler_ir`, `cost_analysis`, …).
    """

    def __init__(self, bound: Bound, lowered: jax.stages.Lowered) -> None:
        self.bound, self.lowered = bound, lowered

    @property
    def plan(self) -> Any:
        return self.bound.plan

    def compile(
        self, compiler_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> CompiledFunction:
        """Compile; arguments as for `jax.stages.Lowered.compile`.

        For compile-only GPUs, the XLA options that they need are added.
        """
        options = {**needed_options(self.bound.mesh), **(compiler_options or {})}
        compiled = self.lowered.compile(compiler_options=options or None, **kwargs)
        return CompiledFunction(self.bound, compiled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)


class CompiledFunction:
    """A sharded function, compiled for one signature; called as the function is.

    Everything that `jax.stages.Compiled` has is here too (`as_text`,
    `memory_analysis`, `cost_analysis`, …).
    """

    def __init__(self, bound: Bound, compiled: jax.stages.Compiled) -> None:
        self.bound, self.compiled = bound, compiled

    @property
    def plan(self) -> Any:
        return self.bound.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run; static arguments are omitted or None, since they were compiled in."""
        arguments: Arguments | None = self.bound.read(args, kwargs)
        if arguments is None:
            tree = jax.tree.structure((args, kwargs))
            name = self.bound.traced.name
            raise TraceError(
                f"`{name}` was compiled for other arguments.",
                numbers=f"got {tree}, compiled for {self.bound.traced.arguments.tree};"
                " or shapes, types or static leaves differ",
                fix=f"lower and compile `{name}` for these, or call it itself.",
            )
        return self.bound.run(arguments, self.compiled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


def lower(bound: Bound) -> Lowered:
    """Lower for the bound's signature and mesh; nothing is allocated."""
    return Lowered(bound, bound.executable.lower(bound.abstract_arrays()))
