"""A pass of one file and one entry is tried, taken, saved and applied again."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import rhino_jax as rhino
from rhino_jax._compat import bind_eqn, open_jaxpr, without_dead_code
from rhino_jax.ir.transform import Transform
from rhino_jax.passes.apply import PASSES
from rhino_jax.passes.program_pass import Gain, ProgramPass, Trial, TrialKind
from rhino_jax.rewrite.emit import substitute


NAME = "contracted from the right"


def contract_from_the_right(closed: Any, program: Any, choice: str) -> Any:
    """Rewrite x @ w @ v to x @ (w @ v)."""
    dots = [e for e in open_jaxpr(closed).eqns if e.primitive.name == "dot_general"]
    read: list[Any] = []

    def instead(eqn: Any, operands: list[Any]) -> list[Any] | None:
        if eqn is dots[0]:
            read.extend(operands)
        if eqn is dots[1]:
            x, w = read
            return bind_eqn(eqn, [x, jnp.dot(w, operands[1])], eqn.params)
        return None

    return without_dead_code(substitute(closed, instead))


PASS = ProgramPass(
    NAME,
    contract_from_the_right,
    lambda traced, limits: [Transform(NAME, 0, 0, "all")],
    Trial(TrialKind.WHILE_BETTER, lambda choice: NAME, gain=Gain.TIME),
)


def chain(x, w, v):
    return x @ w @ v


def test_a_pass_is_one_entry(monkeypatch, tmp_path):
    args = [np.ones(s, np.float32) for s in ((512, 256), (256, 256), (256, 8))]
    options = {"mesh": {"data": 4}, "level": "fast", "progress": False}
    before = rhino.plan(chain, *args, **options)
    monkeypatch.setitem(PASSES, NAME, PASS)
    plan = rhino.plan(chain, *args, **options)
    assert [v.name for v in plan.variants if v.is_chosen] == [NAME]
    assert plan.predicted.step_time_s < before.predicted.step_time_s
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    run = loaded.jit(chain)
    np.testing.assert_allclose(run(*args), chain(*args), rtol=1e-5)
