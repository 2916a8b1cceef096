"""`init` and `check` say what they do, as a first call does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.utils.progress import Progress


def test_init_and_check_name_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def ticking(line: Any) -> Iterator[None]:
        said.append(line._line(3.0))
        yield

    monkeypatch.setattr(Progress, "ticking", ticking)

    def step(x: Any) -> Any:
        return (x @ x).astype(jnp.bfloat16)

    x = jnp.ones((16, 16))
    plan = rhino.plan(step, x, mesh={"x": 8})
    plan.init(lambda: jnp.ones((16, 16)))
    assert said == ["initializing arguments of `step`… 3 s"]
    said.clear()
    plan.check(step, x)
    assert said == [
        "checking `step` on one device… 3 s",
        "checking `step` as planned… 3 s",
    ]
