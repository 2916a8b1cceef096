from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax import diff
from rhino_jax.ir.transform import Transform
from rhino_jax.plan.plan import Leaf
from rhino_jax.plan.records import Traffic
from tests.plan.samples import sample_plan, sample_stage


def test_a_plan_does_not_differ_from_itself() -> None:
    same = diff(sample_plan(), sample_plan())
    assert same.is_empty
    assert "no difference" in str(same)
    assert same.unchanged == 9


def test_changed_specs_are_listed_by_path() -> None:
    a = sample_plan()
    w1 = dataclasses.replace(a.inputs[0], spec=((0,), ()), bytes_per_device=10)
    b = sample_plan(inputs=(w1, *a.inputs[1:]))
    (change,) = diff(a, b).specs
    assert change.path == "params['w1']"
    assert (change.before, change.after) == ("P(None, 'model')", "P('data')")
    assert "params['w1']" in str(a.diff(b))


def test_values_of_one_plan_only_are_absent_in_the_other() -> None:
    a = sample_plan()
    new = Leaf("extra", (8,), "float32", ((),), 32)
    changes = diff(a, sample_plan(inputs=(*a.inputs[:-1], new))).specs
    assert [(c.path, c.before, c.after) for c in changes] == [
        ("batch", "P('data')", ""),
        ("extra", "", "P()"),
    ]


def test_renamed_axes_are_changed_specs() -> None:
    b = sample_plan(mesh_axes=(("data", 4), ("tensor", 2)))
    change = diff(sample_plan(), b)
    assert "P(None, 'tensor')" in {c.after for c in change.specs}
    assert "data=4 × model=2  →  data=4 × tensor=2" in str(change)


def test_collectives_differ_by_kind_and_axes() -> None:
    a = sample_plan()
    more = dataclasses.replace(a.collectives[0], bytes=10, seconds=1.0)
    b = sample_plan(collectives=(*a.collectives[:1], more))
    reduce, gather = diff(a, b).traffic
    assert (reduce.kind, reduce.axes) == ("all-reduce", ("data",))
    assert reduce.before == Traffic(2, 1536, 1.5e-3)
    assert reduce.after == Traffic(4, 1546, 1.0015)
    assert (gather.kind, gather.after) == ("all-gather", Traffic())


def test_another_program_is_said_to_be_one() -> None:
    b = sample_plan(fingerprint="f" * 64, program_name="other")
    text = str(diff(sample_plan(), b))
    assert "not the same" in text and "other" in text


def test_on_another_mesh_the_program_is_not_said_to_be_another() -> None:
    b = sample_plan(fingerprint="f" * 64, mesh_axes=(("data", 2), ("model", 4)))
    found = diff(sample_plan(), b)
    assert not found.is_empty
    assert "not the same" not in str(found)
    assert "data=4 × model=2  →  data=2 × model=4" in str(found)


def test_times_and_memory_stand_side_by_side() -> None:
    a = sample_plan()
    slower = dataclasses.replace(a.predicted, step_time_s=2 * a.predicted.step_time_s)
    text = str(diff(a, sample_plan(predicted=slower)))
    assert "24.6 ms" in text and "2.00x" in text


def test_repeated_layers_and_state_are_told_once() -> None:
    layers = [Leaf(f"h[{i}]", (8, 8), "float32", ((0,), ()), 64) for i in range(5)]
    moved = [dataclasses.replace(x, spec=((), (0,))) for x in layers]
    state = [dataclasses.replace(x, path=f"out: {x.path}") for x in layers]
    moved_state = [dataclasses.replace(x, spec=((), (0,))) for x in state]
    a = sample_plan(inputs=tuple(layers), outputs=tuple(state))
    b = sample_plan(inputs=tuple(moved), outputs=tuple(moved_state))
    text = str(diff(a, b))
    assert "specs: 10 changed" in text
    assert "h[0..4]  5x  P('data')  P(None, 'data')" in text
    assert "5 of state, as the inputs they replace" in text
    assert text.count("h[") == 1


def test_html_escapes_names() -> None:
    b = sample_plan(program_name="<b>x</b>")
    assert "<b>x</b>" not in diff(sample_plan(), b)._repr_html_()


def test_values_inside_that_lie_otherwise_are_counted() -> None:
    a = sample_plan()
    inside = {**a.decisions.values, 7: ((), ())}
    b = sample_plan(stages=(sample_stage(values=inside),))
    found = diff(a, b)
    assert found.values == (1, 3) and not found.is_empty
    assert "1 of 3, inner ones too, with other specs" in str(found)
    # Ids of values say nothing of another program.
    assert diff(a, dataclasses.replace(b, fingerprint="f" * 64)).values == (0, 0)


def test_plans_of_a_program_are_compared() -> None:
    def step(w, x):
        return jnp.tanh(x @ w).sum()

    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    a, b = (
        rhino.plan(step, w, x, mesh={"d": 4}, hardware="v5e:2x2", pins={"x": pin})
        for pin in (jax.P("d"), jax.P(None, "d"))
    )
    found = rhino.diff(a, b)
    assert ("x", "P('d')", "P(None, 'd')") in {
        (c.path, c.before, c.after) for c in found.specs
    }
    assert found.predicted == (a.predicted, b.predicted)
    assert 0 < found.values[0] <= found.values[1]
    with pytest.raises(rhino.PlanFileError, match="no plan"):
        rhino.diff(a, "plan.json")


def test_passes_that_were_chosen_are_said_and_values_not_compared() -> None:
    chosen = Transform("chunks", 40, 50, choice="{}")
    found = diff(sample_plan(), sample_plan(transforms=(chosen,)))
    assert found.chosen == ((), ("chunks",))
    assert found.values == (0, 0)
    assert "transforms  none  →  chunks" in str(found)


def test_plans_of_two_programs_name_the_first_op_that_differs(tmp_path) -> None:
    w, x = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
    options = {"mesh": {"d": 4}, "hardware": "v5e:2x2", "progress": False}
    a = rhino.plan(lambda w, x: jnp.tanh(x @ w), w, x, **options)
    b = rhino.plan(lambda w, x: jnp.sin(x @ w), w, x, **options)
    b.save(tmp_path / "b.json")
    for other in (b, rhino.load_plan(tmp_path / "b.json")):
        change = rhino.diff(a, other).change
        assert "`sin` -> float32[64,64] at test_diff.py" in change
        assert "was `tanh` -> float32[64,64] at test_diff.py" in change
