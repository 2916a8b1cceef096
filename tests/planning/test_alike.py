"""Groups that do the same are searched once."""

from __future__ import annotations

import rhino_jax as rhino
from rhino_jax import models
from rhino_jax.planning.staging.group import alike


def test_stages_of_a_loop_over_layers_are_searched_once(monkeypatch):
    searched = []
    find = alike.find

    def counted(program, *args, is_estimate=False, **more):
        if not is_estimate:  # Of a group, not of a whole micro-batch.
            searched.append(program.name)
        return find(program, *args, is_estimate=is_estimate, **more)

    w = models.get("gpt-tiny", num_layers=8, batch=32)

    def plan():
        return rhino.plan(
            w.step,
            *w.abstract_args(),
            stages=4,
            hardware="cpu:8",
            microbatches=8,
            schedule="1f1b",
            donate_argnums=w.donate_argnums,
            level="fast",
        )

    monkeypatch.setenv("RHINO_CACHE", "0")
    monkeypatch.setattr(alike, "find", counted)
    once = plan()
    # The first, the last, and one of the two between.
    assert len(searched) == 3
    monkeypatch.setattr(
        alike.Finds,
        "find",
        lambda self, program, mesh, *rest: find(program, [mesh], *rest),
    )
    apart = plan()
    for one, other in zip(once.stages, apart.stages, strict=True):
        assert one.decisions == other.decisions
        assert one.predicted == other.predicted
    assert once.predicted == apart.predicted
    assert [leaf.path for leaf in once.inputs] == [leaf.path for leaf in apart.inputs]
