"""Plans compiled for eight emulated devices, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh

import rhino_jax as rhino
from rhino_jax.models import registry
from rhino_jax.plan.records import Predicted, Traffic
from rhino_jax.verify.hlo.collectives.repeated_sums import RepeatedSum
from rhino_jax.verify.hlo.records import OutOfMemory
from rhino_jax.verify.matching.matcher import Difference
from rhino_jax.verify.results.verification import Verification
from rhino_jax.verify.stages import CompiledPlan
from rhino_jax.verify.verdict import Verdict, verdict_of
from tests.cases import covering
from tests.verify.extras import mesh_of_target


def mesh_of(*shape: int) -> Mesh:
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, ("x", "y", "z")[: len(shape)], axis_types=kinds)


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, "float32")


def step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        h = jax.nn.relu(batch @ p["w1"])
        return jnp.sum((h @ p["w2"]) ** 2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


PARAMS = {"w1": shape(512, 2048), "w2": shape(2048, 512)}
BATCH = shape(64, 512)
DATA = {"batch": jax.sharding.PartitionSpec(("x",))}


def plan_of(fn: Any = step, **options: Any) -> rhino.Plan:
    """Data parallel over eight: all-reduces of both gradients."""
    options = {"mesh": mesh_of(8), "hardware": "cpu", "pins": DATA, **options}
    return rhino.plan(fn, PARAMS, BATCH, progress=False, donate_argnums=0, **options)


@pytest.fixture(scope="module")
def plan() -> rhino.Plan:
    return plan_of()


@pytest.fixture(scope="module")
def found(plan: rhino.Plan) -> Verification:
    return plan.verify(step, PARAMS, BATCH)


def test_data_parallelism_moves_what_its_plan_says(
    plan: rhino.Plan, found: Verification
) -> None:
    assert found.ok and found.problems == ()
    assert (found.platform, found.hardware) == ("cpu", "cpu")
    assert found.predicted == plan.predicted
    assert found.rematerialised == () and found.out_of_memory is None
    assert found.planned_wire_bytes > 0
    harmful = [d for d in found.differences if not d.is_harmless]
    assert not harmful
    assert found.compiled is not None and found.memory is not None
    assert found.compiled.flops_per_device == pytest.approx(
        plan.predicted.flops_per_device, rel=0.05
    )


def test_what_was_donated_in_planning_is_donated_in_verifying(
    plan: rhino.Plan, found: Verification
) -> None:
    params = sum(x.bytes_per_device for x in plan.inputs if x.is_donated)
    assert params and found.memory is not None
    assert found.memory.alias_bytes == params
    kept = rhino.plan(
        step,
        PARAMS,
        BATCH,
        mesh=mesh_of(8),
        hardware="cpu",
        pins=DATA,
        progress=False,
    )
    memory = kept.verify(step, PARAMS, BATCH).memory
    assert memory is not None and memory.alias_bytes == 0


def test_a_loaded_plan_verifies_as_the_one_that_was_saved(
    plan: rhino.Plan, found: Verification, tmp_path: Any
) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    again = loaded.verify(step, PARAMS, BATCH, compile_for="cpu")
    assert again.collectives == found.collectives
    assert again.memory == found.memory


def test_sharded_functions_jitted_ones_and_methods_verify(plan: rhino.Plan) -> None:
    options = {"mesh": mesh_of(8), "hardware": "cpu", "pins": DATA, "progress": False}
    sharded = rhino.auto_shard(step, donate_argnums=0, **options)
    again = sharded.plan(PARAMS, BATCH).verify(sharded, PARAMS, BATCH)
    jitted = jax.jit(step, donate_argnums=0)
    assert again.collectives == plan.verify(jitted, PARAMS, BATCH).collectives

    class Trainer:
        @rhino.auto_shard(static_argnums=0, donate_argnums=1, **options)
        def train(self, params: Any, batch: Any) -> Any:
            return step(params, batch)

    trainer = Trainer()
    method = trainer.train.plan(PARAMS, BATCH).verify(trainer.train, PARAMS, BATCH)
    assert method.wire_bytes == again.wire_bytes
    assert method.memory == again.memory


def test_static_and_keyword_arguments_reach_the_function() -> None:
    def scaled(x: Any, *, w: Any, twice: bool) -> Any:
        return (x @ w) * (2 if twice else 1)

    options = {"static_argnames": "twice"}
    call = {"w": shape(512, 64), "twice": True}
    plan = rhino.plan(
        scaled, BATCH, mesh=mesh_of(2, 4), progress=False, **call, **options
    )
    assert plan.verify(scaled, BATCH, **call, **options).ok


def test_a_mesh_and_an_abstract_plan_compile_for_what_they_are_told() -> None:
    plan = plan_of(mesh={"x": 8}, hardware="v5e")
    for compile_for in ("cpu", mesh_of(8)):
        found = plan.verify(step, PARAMS, BATCH, compile_for=compile_for)
        assert found.ok and found.platform == "cpu"
        assert (found.hardware, found.planned_hardware) == ("cpu", "v5e")
        assert any("step times do not" in note for note in found.notes)
        # Both sides are priced alike, so what is planned is no difference.
        assert sum(d.seconds for d in found.differences) == pytest.approx(
            sum(c.seconds for c in found.collectives)
            - sum(c.seconds for c in found.planned)
        )


def test_more_devices_than_are_here_are_emulated() -> None:
    plan = plan_of(mesh={"x": 16}, hardware="cpu")
    found = plan.verify(step, PARAMS, BATCH)
    assert found.ok and found.hardware == "cpu"
    assert found.wire_bytes == pytest.approx(found.planned_wire_bytes, rel=0.01)


def test_a_plan_of_another_program_is_refused(plan: rhino.Plan) -> None:
    def other(params: Any, batch: Any) -> Any:
        return step(params, batch * 2)

    with pytest.raises(rhino.PlanFileError, match="not for this program"):
        plan.verify(other, PARAMS, BATCH)


def test_other_meshes_and_things_that_are_none_are_refused(plan: rhino.Plan) -> None:
    with pytest.raises(rhino.MeshError, match="not the one that was planned for"):
        plan.verify(step, PARAMS, BATCH, compile_for=mesh_of(4, 2))
    with pytest.raises(rhino.MeshError, match="cannot be compiled for"):
        plan.verify(step, PARAMS, BATCH, compile_for=8)
    with pytest.raises(rhino.HardwareError, match="not known"):
        plan.verify(step, PARAMS, BATCH, compile_for="v99:8")


def test_tables_lines_and_html_tell_the_verdict(found: Verification) -> None:
    assert str(found).count("\n") == 0 and ": ok, predicted " in str(found)
    text = found.table(full=True)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text.startswith("verification of step: ok, predicted ")
    for word in ("wire bytes", "peak memory", "all-reduce"):
        assert word in text
    html = found._repr_html_()
    assert html.startswith('<div class="rhino-report">') and "<script" not in html
    assert "http" not in html


def test_step_times_of_emulated_devices_are_not_judged(found: Verification) -> None:
    assert found.time_ok is None and found.peak_ok and found.traffic_ok
    first, *rest = found.table().splitlines()
    assert first.endswith("time not judged") and "compiled time" not in first
    assert any("not judged: emulated devices" in line for line in rest)
    assert found.compiled is not None
    assert sum(d.seconds for d in found.time_differences) == pytest.approx(
        found.compiled.step_time_s - found.predicted.step_time_s
    )
    assert "lines whose time" in found.table(full=True)


def test_out_of_memory_is_a_result_and_is_told(found: Verification) -> None:
    out = OutOfMemory(needed_bytes=2**35, available_bytes=2**34, message="HbmOom")
    told = replace(
        found,
        compiled=None,
        collectives=(),
        out_of_memory=out,
        verdict=Verdict(peak=("no fit.",), no_time="no fit"),
    )
    assert not told.ok and not told.peak_ok and not told.traffic_ok
    assert "out of memory" in str(told) and told.problems == ("no fit.",)
    assert "32.0 GiB" in told.table() and "HbmOom" in told.table()


GOOD = Predicted(1e-3, 8e-4, 2e-4, 2**30, 1e9)


def verdict(
    plan: rhino.Plan,
    compiled: Predicted = GOOD,
    *,
    predicted: Predicted = GOOD,
    differences: tuple[Difference, ...] = (),
    repeated_sums: Any = (),
    no_time: str = "",
    **changes: Any,
) -> Verdict:
    changed = replace(plan, predicted=predicted, memory_budget_bytes=2**32)
    made = CompiledPlan(platform="gpu", compiled=compiled, collectives=(), **changes)
    return verdict_of(
        changed,
        made,
        differences,
        planned=plan.collectives,
        repeated_sums=repeated_sums,
        no_time=no_time,
    )


def difference(nbytes: int, seconds: float, **changes: Any) -> Difference:
    return Difference(**{
        "kind": "all-gather",
        "axes": ("x",),
        "predicted": Traffic(),
        "compiled": Traffic(1, nbytes, seconds),
        "label": "not in the plan",
        "cause": "",
        "is_harmless": False,
        **changes,
    })  # fmt: skip


def test_every_criterion_of_traffic_and_peak_fails_alone(plan: rhino.Plan) -> None:
    assert verdict(plan) == Verdict()
    moved = sum(c.bytes for c in plan.collectives)
    heavy, light = difference(moved, 6e-5), difference(moved, 4e-5)
    missing = difference(0, 0.0, predicted=Traffic(1, moved, 6e-5), compiled=Traffic())
    out = OutOfMemory(needed_bytes=None, available_bytes=None, message="")
    sums = [RepeatedSum("all-reduce", ("x", "y"), ("y",), 4, "dot", "step.py:3")]

    def peak(nbytes: int) -> Predicted:
        return replace(GOOD, peak_bytes=nbytes)

    peaks: list[tuple[str, Verdict]] = [
        ("does not fit", verdict(plan, out_of_memory=out)),
        ("over the budget", verdict(plan, peak(2**32 + 1))),
        ("predicted 1.00 GiB", verdict(plan, peak(3 * 2**29))),
        ("predicted 1.00 GiB", verdict(plan, peak(3 * 2**28))),
    ]
    traffic: list[tuple[str, Verdict]] = [
        ("4 times too large", verdict(plan, repeated_sums=sums)),
        ("rematerialises 1", verdict(plan, rematerialised=("a line",))),
        ("more than planned", verdict(plan, differences=(heavy,))),
        ("differ from the plan", verdict(plan, differences=(light, light))),
        ("differ from the plan", verdict(plan, differences=(missing,))),
    ]
    for word, told in peaks:
        assert word in told.peak[0] and not told.traffic and not told.time
    for word, told in traffic:
        assert any(word in line for line in told.traffic) and not told.peak
    harmless = replace(heavy, is_harmless=True)
    assert verdict(plan, differences=(light,)) == Verdict()
    assert verdict(plan, differences=(harmless,)) == Verdict()
    assert verdict(plan, peak(2**30 + 2**28)) == Verdict()
    assert verdict(plan, peak(2**30 - 2**27)) == Verdict()
    # A difference of 1 % of the budget decides no plan.
    small = replace(GOOD, peak_bytes=2**20)
    assert verdict(plan, peak(30 * 2**20), predicted=small) == Verdict()


@pytest.mark.parametrize("predicted_s", [3e-4, 1e-5, 1.0])
def test_step_times_are_judged_by_their_ratio_above_a_few_launches(
    plan: rhino.Plan, predicted_s: float
) -> None:
    predicted = replace(GOOD, step_time_s=predicted_s)

    def told(ratio: float) -> Verdict:
        made = replace(GOOD, step_time_s=ratio * predicted_s)
        return verdict(plan, made, predicted=predicted)

    for ratio in (1.59, 1 / 1.59):
        assert told(ratio) == Verdict()
    for ratio in (1.61, 1 / 1.61):
        is_judged = predicted_s > 1e-4
        assert bool(told(ratio).time) is is_judged
        assert told(ratio) == replace(Verdict(), time=told(ratio).time)
    made = replace(GOOD, step_time_s=2 * predicted_s)
    unjudged = verdict(plan, made, predicted=predicted, no_time="of a mesh")
    assert unjudged == Verdict(no_time="of a mesh")


@pytest.mark.parametrize(
    ("name", "dims", "recompute"),
    covering(
        [
            ("mlp-tiny", (2, 4), "auto"),
            ("gpt-tiny", (2, 4), "auto"),
            ("gpt-demo", (2, 4), "auto"),
            ("wide-resnet-tiny", (2, 4), "auto"),
            ("moe-tiny", (2, 4), "auto"),
            ("llama-tiny", (2, 2, 2), "as written"),
        ],
        2,
    ),
)
def test_plans_of_the_zoo_hold_on_cpu(
    name: str, dims: tuple[int, ...], recompute: str
) -> None:
    work = registry.get(name)
    args = work.abstract_args()
    plan = rhino.plan(
        work.step,
        *args,
        mesh=mesh_of(*dims),
        hardware="v6e",
        recompute=recompute,
        donate_argnums=work.donate_argnums,
        progress=False,
    )
    found = plan.verify(work.step, *args, compile_for="cpu")
    assert found.ok, found.table(full=True)
    assert found.rematerialised == ()


@pytest.mark.compile_only
@pytest.mark.parametrize("name", ["gpt-demo", "wide-resnet-tiny"])
@pytest.mark.parametrize("hardware", ["v5e:2x4", "h100:8"])
def test_plans_hold_on_tpu_and_gpu(name: str, hardware: str) -> None:
    """As written: without `jax.checkpoint`, XLA:TPU makes one all-reduce of gradients'
    reduce-scatters over both axes of the GPT."""
    mesh_of_target(hardware)
    work = registry.get(name)
    args = work.abstract_args()
    plan = rhino.plan(
        work.step,
        *args,
        mesh={"x": 2, "y": 4},
        hardware=hardware,
        recompute="as written",
        donate_argnums=work.donate_argnums,
        progress=False,
    )
    found = plan.verify(work.step, *args, compile_for=hardware)
    assert found.hardware == hardware
    assert found.platform == ("tpu" if hardware.startswith("v") else "gpu")
    assert found.rematerialised == ()
    assert found.ok, found.table(full=True)
