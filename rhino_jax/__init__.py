"""rhino_jax: a JAX function written for one device, planned and run on many.

>>> import rhino_jax as rhino
>>> @rhino.auto_shard(donate_argnums=(0, 1))
... def train_step(params, opt_state, batch): ...
"""

from __future__ import annotations

from rhino_jax.api import auto_shard as auto_shard, load_plan as load_plan, plan as plan
from rhino_jax.api_audit import audit as audit
from rhino_jax.api_together import plan_together as plan_together
from rhino_jax.apply.sharded import ShardedFunction as ShardedFunction
from rhino_jax.errors import (
    HardwareError as HardwareError,
    InfeasiblePlanError as InfeasiblePlanError,
    MeshError as MeshError,
    PinError as PinError,
    PlanFileError as PlanFileError,
    ProcessError as ProcessError,
    RhinoError as RhinoError,
    RhinoWarning as RhinoWarning,
    RuleError as RuleError,
    TraceError as TraceError,
)
from rhino_jax.frontend.check import check_rule as check_rule
from rhino_jax.frontend.pin import pin as pin
from rhino_jax.frontend.registry import (
    OpContext as OpContext,
    OpRule as OpRule,
    register_rule as register_rule,
)
from rhino_jax.hardware.files import load_target as load_target
from rhino_jax.hardware.target import Target as Target
from rhino_jax.plan.plan import Plan as Plan
from rhino_jax.plan.plans import Plans as Plans
from rhino_jax.verify.audit import Audit as Audit
from rhino_jax.verify.check import Check as Check
from rhino_jax.verify.targets import compile_target as compile_target
from rhino_jax.verify.verification import Verification as Verification


__version__ = "0.1.0"
