"""Tracing of the function with another batch size.

The batch is the leading dim of the arguments that are data, which the analysis
distinguishes from parameters and state by their use; it is the dim that `microbatches`
splits. If data arguments have different leading dims (images, and patches of them), all
change in the same proportion.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.errors import RhinoError
from rhino_jax.frontend.call import Call
from rhino_jax.frontend.parameters import Parameters
from rhino_jax.frontend.trace import Traced, trace_call
from rhino_jax.sweep.point import WHAT


def leading_dims(analysis: ProgramAnalysis) -> dict[int, int]:
    """Return position of an argument that is data → size of its leading dim."""
    graph, roles = analysis.graph, analysis.roles
    found = {}
    for node in graph.nodes:
        if node.kind.value != "input" or node.slot not in roles.data:
            continue
        dims = analysis.dim_classes.results(node, 0)
        if dims and dims[0] in roles.batch:
            found[node.slot] = graph.program.values[node.value].shape[0]
    return found


def with_batch(
    parameters: Parameters, call: Call, analysis: ProgramAnalysis, batch: int
) -> Traced:
    """Retrace a call with arguments of another batch size.

    Args:
      parameters: signature of the function, with static and donated arguments.
      call: the original call.
      analysis: analysis of its program, which identifies the data arguments.
      batch: the new size.

    Raises:
      RhinoError: no argument has a batch, or the size of one would not be an integer.
    """
    dims = leading_dims(analysis)
    if not dims:
        raise RhinoError(
            f"{WHAT}: no argument of `{parameters.name}` has a batch.",
            where="batch=",
            numbers="no leading dim of an argument runs through the program as data",
            fix="leave out batch=, and sweep once for each size.",
        )
    now = Counter(dims.values()).most_common(1)[0][0]
    arrays = [jax.typeof(x) if not hasattr(x, "shape") else x
              for x in call.leaves.arrays]  # fmt: skip
    for slot, size in dims.items():
        if size * batch % now:
            raise RhinoError(
                f"{WHAT}: batch={batch} makes no whole leading dim.",
                where=call.leaves.array_paths[slot],
                numbers=f"{size} of a batch of {now}, so {size * batch / now:g} of"
                f" {batch}",
                fix=f"take multiples of {now}.",
            )
        x = arrays[slot]
        shape = (size * batch // now, *x.shape[1:])
        arrays[slot] = jax.ShapeDtypeStruct(shape, x.dtype)
    changed = call.leaves.with_arrays(arrays)
    args, kwargs = changed.unflatten(arrays)
    other = replace(call, leaves=changed, args=tuple(args), kwargs=kwargs)
    return trace_call(parameters, other, what=WHAT)
