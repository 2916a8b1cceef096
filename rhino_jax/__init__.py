"""rhino_jax: a JAX function written for one device, planned and run on many.

>>> import rhino_jax as rhino
>>> @rhino.auto_shard(donate_argnums=(0, 1))
... def train_step(params, opt_state, batch): ...

How a sharding comes about, with the matmul of a small function followed through every
pass. `dump=` writes what each gives to the file whose name stands beside it:

    def step(w, x):
        return jnp.tanh(x @ w).sum()

    w = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((65536, 8192), jnp.bfloat16)
    plan = rhino.plan(step, w, x, mesh={"data": 4}, hardware="v5e:2x2", dump="passes")

`frontend` traces the function on shapes alone. An op is its factors, index ranges that
its operands' and results' dims are made of; `m`, `n` and `k` may be cut, and `k` leaves
a partial sum. (00_trace.txt)

    %2: bf16[65536,8192] = dot_general %1 %0  {m k, k n -> m n}

`analysis` makes one flat graph of the program and its loops: the matmul is a node that
reads the nodes of both arguments. (01_inline.txt)

    n2 dot_general %2: bf16[65536,8192]  reads n1 n0

What holds on any mesh: `d2` is the index range of the rows of `x`, of the matmul and of
all that follows. (02_analyse.txt)

    n2 dot_general %2  dims (d2 d1)

`model` lays the mesh over the links of the hardware, and prices every way to give its
axes to the factors: nothing cut, the rows, the contraction (whose sums are then
combined, in three ways), the columns; and for every edge what it costs to change one
layout into another. (03_price.txt)

    0  P(), P() -> P()  50.6 ms
    1  P('data'), P() -> P('data')  12.6 ms
    3  P(None, 'data'), P('data') -> P('data')  summed over data  21.6 ms
    n1 → n2  3 × 6  at most 11.6 ms

`planner` folds nodes that are alike, as those of a model's layers are; here none is.
(04_fold.txt)

    folded  6 nodes to 6, 5 edges to 5

`recipes` says what experts would have typed: points of the search space, from which the
search starts. (05_recipes.txt)

    fsdp  12.6 ms

`solver` takes one option of every node, so that nodes and edges together cost least
within memory, and proves how far from the least that may be. (06_solve.txt)

    n2 dot_general %2  1  P('data'), P() -> P('data')  12.6 ms

`plan` says it in the terms of the program. (07_read_back.txt)

    %2  P('data')

`runtime` runs the function as it was written, with this spec as a sharding constraint
on the matmul's result, from which XLA's partitioner makes the local matmul of 16384
rows; `verify` reads it back from the compiled program.
"""

from __future__ import annotations

from rhino_jax.api import auto_shard as auto_shard, load_plan as load_plan, plan as plan
from rhino_jax.errors import (
    HardwareError as HardwareError,
    InfeasiblePlanError as InfeasiblePlanError,
    MeshError as MeshError,
    MicrobatchError as MicrobatchError,
    PinError as PinError,
    PlanFileError as PlanFileError,
    ProcessError as ProcessError,
    RhinoError as RhinoError,
    RhinoWarning as RhinoWarning,
    RuleError as RuleError,
    ScheduleError as ScheduleError,
    StageError as StageError,
    TraceError as TraceError,
)
from rhino_jax.explain.results.audit import Audit as Audit
from rhino_jax.explain.results.check import Check as Check
from rhino_jax.explain.results.diff import diff as diff
from rhino_jax.explain.results.plan import Plan as Plan
from rhino_jax.explain.results.verification import Verification as Verification
from rhino_jax.frontend.check.rule import check_rule as check_rule
from rhino_jax.frontend.pin import pin as pin
from rhino_jax.frontend.registry import (
    OpContext as OpContext,
    OpRule as OpRule,
    register_rule as register_rule,
)
from rhino_jax.hardware.emulated import widen_pool as _widen_pool
from rhino_jax.hardware.files import load_target as load_target
from rhino_jax.hardware.target import Target as Target
from rhino_jax.ir.traits import OpKind as OpKind, Traits as Traits
from rhino_jax.plan.plans import Plans as Plans
from rhino_jax.planner.audit import audit as audit
from rhino_jax.planner.joint.together import plan_together as plan_together
from rhino_jax.runtime.sharded import ShardedFunction as ShardedFunction
from rhino_jax.sweep.sweep import sweep as sweep
from rhino_jax.verify.targets import compile_target as compile_target
from rhino_jax.version import __version__ as __version__


_widen_pool()
