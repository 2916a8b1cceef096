"""A saved plan survives edits of the code that change nothing of what is computed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rhino_jax as rhino
from tests.cases import covering


CODE = """
@jax.custom_vjp
def act(x):
    return jnp.tanh(x)

act.defvjp(lambda x: (act(x), x), lambda r, g: (g * (1 - jnp.tanh(r) ** 2),))

@jax.jit
def layer(w, x):
    return act(x @ w)

def train(params, opt_state, batch):
    def loss_fn(p):
        with jax.named_scope("model"):
            h = jax.checkpoint(layer)(p["w1"], batch["x"])
            h, _ = jax.lax.scan(
                lambda c, w: (jax.nn.gelu(layer(w, c)), None), h, p['ws'], length=3)
        return optax.softmax_cross_entropy_with_integer_labels(h, batch["y"]).mean()
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
"""
OPT = optax.adamw(1e-2)

Edits = list[tuple[str, str]]
HARMLESS: dict[str, Edits] = {
    "another name": [("train(", "fit(")],
    "other names inside": [("loss_fn", "cost"), ("layer", "block"), ("act", "squash")],
    "other variables": [("grads", "g")],
    "other lines": [("def train", "\n\n# A comment.\ndef train")],
    "another scope": [('"model"', '"body"')],
    "dead code": [("    updates,", "    seen = jnp.sin(grads['w1'])\n    updates,")],
    "dead code inside": [("    return act(x", "    seen = x.sum()\n    return act(x")],
    "another number": [("1 - jnp", "1.0 - jnp")],
}
HARMFUL: dict[str, Edits] = {
    "another op": [("tanh(x)", "sin(x)")],
    "another operand": [("act(x @ w)", "act(x @ w.T)")],
    "one more": [("act(x @ w)", "act(x @ w) + x")],
    "one less": [("jax.nn.gelu(layer(w, c))", "layer(w, c)")],
    "another type": [("x @ w", "(x @ w).astype(jnp.bfloat16).astype(x.dtype)")],
    "another loop": [("p['ws'], length=3", "p['ws'][:2], length=2")],
    "another parameter": [("opt_state", "state")],
}


def function(edits: Edits) -> Any:
    code = CODE
    for old, new in edits:
        assert old in code, old
        code = code.replace(old, new)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "optax": optax, "opt": OPT}
    exec(compile(code, "edited.py", "exec"), names)
    return names["fit" if "def fit(" in code else "train"]


@functools.cache
def args() -> Any:
    rng = np.random.default_rng(0)
    params = {
        "w1": (rng.normal(size=(16, 16)) / 4).astype(np.float32),
        "ws": (rng.normal(size=(3, 16, 16)) / 4).astype(np.float32),
    }
    x = rng.normal(size=(32, 16)).astype(np.float32)
    batch = {"x": x, "y": np.arange(32, dtype=np.int32) % 16}
    return params, jax.jit(OPT.init)(params), batch


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    rhino.plan(function([]), *args(), mesh={"a": 4, "b": 2}).save(path)
    return path


@pytest.mark.parametrize("edit", HARMLESS)
def test_it_survives(saved: Path, edit: str) -> None:
    rhino.load_plan(saved).jit(function(HARMLESS[edit])).lower(*args())


@pytest.mark.parametrize("edit", covering(HARMLESS, ["other variables"]))
def test_results_stay(saved: Path, edit: str) -> None:
    fn = function(HARMLESS[edit])
    *_, loss = rhino.load_plan(saved).jit(fn)(*args())
    *_, want = jax.jit(fn)(*args())
    np.testing.assert_allclose(loss, want, rtol=1e-5)


@pytest.mark.parametrize("edit", HARMFUL)
def test_it_is_refused(saved: Path, edit: str) -> None:
    fn = function(HARMFUL[edit])
    with pytest.raises(rhino.PlanFileError):
        rhino.load_plan(saved).jit(fn).lower(*args())
