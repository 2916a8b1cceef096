"""rhino_jax: a JAX function written for one device, planned and run on many.

>>> import rhino_jax as rhino
>>> @rhino.auto_shard(donate_argnums=(0, 1))
... def train_step(params, opt_state, batch): ...

How a sharding is found: the matmul of a small function, followed through every pass.
`dump=` names the folder to which each pass writes its result, in the file named here:

    def step(w, x):
        return jnp.tanh(x @ w).sum()

    w = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((65536, 8192), jnp.bfloat16)
    plan = rhino.plan(step, w, x, mesh={"data": 4}, hardware="v5e:2x2", dump="passes")

`frontend` traces the function on shapes alone. An op is its factors, index ranges that
its operands' and results' dims are made of; `m`, `n` and `k` may be sharded, and a
sharded `k` leaves a partial sum. (00_trace.txt)

    %2: bf16[65536,8192] = dot_general %1 %0  {m k, k n -> m n}

`analysis` makes one flat graph of the program and its loops: the matmul is a node that
reads the nodes of both arguments. (01_inline.txt)

    n2 dot_general %2: bf16[65536,8192]  reads n1 n0

It also finds what holds on any mesh: `d2` is the index range of the rows of `x`, of the
matmul and of all that follows. (02_analyse.txt)

    n2 dot_general %2  dims (d2 d1)

`model` lays the mesh over the links of the hardware, and estimates the cost of every
assignment of its axes to the factors: nothing sharded, the rows, the contraction (whose
partial sums are then reduced, in three ways), the columns; and for every edge the cost
of resharding from one layout to another. (03_price.txt)

    0  P(), P() -> P()  50.6 ms
    1  P('data'), P() -> P('data')  12.6 ms
    3  P(None, 'data'), P('data') -> P('data')  summed over data  22.8 ms
    n1 → n2  3 × 6  at most 11.6 ms

`planner` folds isomorphic nodes, as those of a model's layers are; here none is.
(04_fold.txt)

    folded  6 nodes to 6, 5 edges to 5

`recipes` gives the layouts that experts write by hand: points of the search space, from
which the search starts. (05_recipes.txt)

    fsdp  13.5 ms

`solver` chooses one option of every node, so that the cost of nodes and edges together
is minimal within memory, and proves a bound on the gap. (06_solve.txt)

    n2 dot_general %2  1  P('data'), P() -> P('data')  12.6 ms

`plan` has the result as specs of the program's values. (07_read_back.txt)

    %2  P('data')

`runtime` runs the function as it was written, with this spec as a sharding constraint
on the matmul's result, from which XLA's partitioner makes the local matmul of 16384
rows; `verify` reads it back from the compiled program.

Micro-batches. Passes (`passes` lists them, as remat and unrolled layers) rewrite the
program before all of this: here a train step of two layers, in four micro-batches.

    def train(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return (y**2).sum()

        grads = jax.grad(loss)(weights)
        return [w - g for w, g in zip(weights, grads)]

    options = dict(hardware="v5e:2x2", microbatches=4, donate_argnums=0)
    rhino.plan(train, [w, w], x, mesh={"data": 4}, dump="microbatches", **options)

`passes.microbatch` finds the ops that carry rows of the batch and moves them into a
loop, whose body has the rows of one micro-batch. A gradient is a sum over rows: it is
accumulated in f32, as a carry of the loop. The rewritten program goes through the same
passes as any other. (microbatches/*_inline.txt)

    dynamic_slice: bf16[1,16384,1,1,8192]  4 times
    dot_general: bf16[16384,8192]  4 times
    carry: f32[8192,8192]
    sub: bf16[8192,8192]

Pipeline stages. The same loop, its body split over two submeshes of two devices.

    mesh = {"stage": 2, "data": 2}
    staged = rhino.plan(train, [w, w], x, mesh=mesh, dump="stages", **options)

`passes.staged` gives each op of the body to a stage and makes tasks of them: forward
and backward of a micro-batch, and the update, once a step. The tasks of a stage are one
program, planned as above; this one has the weight of the second layer, and receives
the first layer's output. (stages/*_inline.txt)

    input: bf16[8192,8192]
    input: bf16[16384,8192]
    dot_general: bf16[16384,8192]  4 times
    output: bf16[16384,8192]

`pipeline` runs the tasks' costs through each schedule and takes the fastest: forward of
micro-batch 0 on stage 0, then, while stage 0 goes on, on stage 1; backward in the other
direction; `runtime.tasks` runs them in this order. (staged.simulate().table())

    0 F0
    1
    busy  bubble
"""

from __future__ import annotations

from rhino_jax.api import audit, auto_shard, load_plan, plan, plan_together
from rhino_jax.errors import (
    HardwareError,
    InfeasiblePlanError,
    MeshError,
    MicrobatchError,
    PinError,
    PlanFileError,
    ProcessError,
    RhinoError,
    RhinoWarning,
    RuleError,
    ScheduleError,
    StageError,
    TraceError,
)
from rhino_jax.explain.diff import diff
from rhino_jax.explain.plan import Plan
from rhino_jax.frontend.check.rule import check_rule
from rhino_jax.frontend.forms.attention import attention
from rhino_jax.frontend.forms.choose import choose
from rhino_jax.frontend.pin import pin
from rhino_jax.frontend.registry import (
    OpContext,
    OpRule,
    register_rule,
)
from rhino_jax.hardware.emulated import widen_pool as _widen_pool
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.ir.traits import OpKind, Traits
from rhino_jax.plan.shared import Plans
from rhino_jax.runtime.sharded import ShardedFunction
from rhino_jax.sweep.sweep import sweep
from rhino_jax.verify.results.audit import Audit
from rhino_jax.verify.results.check import Check
from rhino_jax.verify.results.verification import Verification
from rhino_jax.verify.targets import compile_target
from rhino_jax.version import __version__


__all__ = [
    "Audit",
    "Check",
    "HardwareError",
    "InfeasiblePlanError",
    "MeshError",
    "MicrobatchError",
    "OpContext",
    "OpKind",
    "OpRule",
    "PinError",
    "Plan",
    "PlanFileError",
    "Plans",
    "ProcessError",
    "RhinoError",
    "RhinoWarning",
    "RuleError",
    "ScheduleError",
    "ShardedFunction",
    "StageError",
    "Target",
    "TraceError",
    "Traits",
    "Verification",
    "__version__",
    "attention",
    "audit",
    "auto_shard",
    "check_rule",
    "choose",
    "compile_target",
    "diff",
    "load_plan",
    "load_target",
    "pin",
    "plan",
    "plan_together",
    "register_rule",
    "sweep",
]

_widen_pool()
