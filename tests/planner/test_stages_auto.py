"""`stages="auto"`: where a slow link or memory asks for stages, and nowhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.hardware.files import load_target
from rhino_jax.planner.searched import counts_of, evenness, merged
from tests.cases import covering


WIDTH, LAYERS, ROWS = 1024, 12, 128

HARDWARE = """
name = "two-hosts"
device_kinds = ["cpu"]
matmul_efficiency = 1.0
memory_efficiency = 1.0
overlap_share = 0.0
launch_s = 0.0
[peak_flops_per_s]
float32 = 1e12
[memory]
hbm_bytes = 2147483648
hbm_bytes_per_s = 1e12
[[tiers]]
name = "inside"
topology = "switch"
size = {domain}
alpha_s = 1e-7
bytes_per_s = 1e11
[[tiers]]
name = "between"
topology = "switch"
alpha_s = 1e-6
bytes_per_s = {slow}
"""


@pytest.fixture(scope="module")
def hardware(tmp_path_factory):
    def write(slow=5e8, domain=2):
        file = tmp_path_factory.mktemp("hosts") / "hosts.toml"
        file.write_text(HARDWARE.format(slow=slow, domain=domain))
        return str(file)

    return write


def train_step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - x) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(layers=LAYERS, width=WIDTH):
    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return [f32(width, width)] * layers, f32(ROWS, width)


def planned(hardware, args=None, **options):
    args = args or arguments()
    return rhino.plan(train_step, *args, hardware=hardware, donate_argnums=0, **options)


@pytest.fixture(scope="module")
def one(hardware):
    """The plan on one mesh."""
    return planned(f"{hardware()}:2x2", stages=1)


@pytest.fixture(scope="module")
def plan(hardware):
    """The plan in stages that rhino chose itself."""
    return planned(f"{hardware()}:2x2")


def test_stages_lie_across_hosts_where_little_passes_between_them(plan, one):
    assert len(plan.stages) == 2
    assert [stage.devices for stage in plan.stages] == [(0, 1), (2, 3)]
    assert plan.predicted.step_time_s < 0.95 * one.predicted.step_time_s
    assert [v.name for v in plan.variants if v.is_chosen] == [
        f"2 stages, {plan.microbatches} micro-batches"
    ]
    assert any(v.step_time_s == one.predicted.step_time_s for v in plan.variants)
    assert "on one mesh, devices do the work 2.0 times, to send less" in plan.notes[-1]
    assert "2: " in plan.notes[-1]
    assert not any("idle" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("slow", "domain", "topology"),
    covering([(1e9, 4, "1x4"), (1e12, 2, "2x2")]),
)
def test_there_are_none_where_links_are_fast(hardware, slow, domain, topology):
    plan = planned(f"{hardware(slow, domain)}:{topology}")
    assert len(plan.stages) == 1 and plan.pipeline is None
    if domain == 4:
        assert not any("stages were compared" in note for note in plan.notes)


def heavy_first(params, x):
    """Half of the work is in one op."""

    def loss(params):
        h = jnp.tanh(x @ params["wide"])
        h = h[:, :WIDTH] + h[:, WIDTH : 2 * WIDTH]
        for w in params["layers"]:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - x) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@pytest.mark.slow
def test_a_group_is_larger_where_one_op_is_most_of_the_work(hardware):
    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"layers": [f32(WIDTH, WIDTH)] * 12, "wide": f32(WIDTH, 10 * WIDTH)}

    def plan_in(stages):
        return rhino.plan(
            heavy_first,
            params,
            f32(2 * ROWS, WIDTH),
            stages=stages,
            microbatches=8,
            schedule="1f1b",
            hardware=f"{hardware()}:4x2",
            donate_argnums=0,
        )

    plan = plan_in("auto")
    assert [len(stage.devices) for stage in plan.stages] == [4, 2, 2]
    for equal in (2, 4):
        assert plan.predicted.step_time_s < plan_in(equal).predicted.step_time_s
    assert "3 of 2/4 + 1/4 + 1/4: " in plan.notes[-1]
    assert plan.with_(memory_budget_bytes=2**30).places == (2, 1, 1)


@pytest.mark.slow
def test_groups_about_as_busy_as_each_other_stay_equal(hardware):
    options = {"stages": 4, "microbatches": 8, "schedule": "1f1b"}
    plan = planned(f"{hardware(1e9)}:4x2", arguments(32, 512), **options)
    assert evenness(plan)[0] == pytest.approx(0.88, abs=0.02)
    assert merged(plan, 2 * plan.predicted.step_time_s) == []


@pytest.mark.slow
def test_what_is_asked_for_is_not_chosen_anew(hardware, one):
    file = hardware()
    assert len(one.stages) == 1
    assert len(planned(f"{file}:2x2", microbatches=1).stages) == 1
    assert len(planned(f"{file}:2x2", mesh={"data": 4}).stages) == 1


@pytest.mark.slow
def test_the_plan_on_one_mesh_stays_where_stages_cannot_be(hardware):
    def normalised(params, x):
        # The batch meets itself in every layer, so that no micro-batch runs alone.
        def loss(params):
            h = x
            for w in params:
                h = h @ w
                h = jnp.tanh((h - h.mean(0)) / (1e-3 + h.std(0)))
            return jnp.mean((h - x) ** 2)

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    options = {"hardware": f"{hardware()}:2x2", "level": "fast"}
    plan = rhino.plan(normalised, *arguments(), **options)
    assert len(plan.stages) == 1
    assert "2: not possible" in plan.notes[-1]
    assert [v.name for v in plan.variants if v.is_chosen] == ["one mesh"]


@pytest.mark.slow
def test_what_fits_nowhere_says_what_one_mesh_says(hardware):
    with pytest.raises(InfeasiblePlanError, match="memory"):
        planned(f"{hardware()}:2x2", memory_budget_bytes="1MiB", level="fast")


@pytest.mark.parametrize(
    ("topology", "fits", "counts"),
    [("8x8", True, [2, 4, 8]), ("1x8", True, []), ("1x8", False, [2, 4, 8])],
)
def test_groups_are_whole_hosts(topology, fits, counts):
    target = load_target(f"h100:{topology}")
    assert counts_of(target, target.num_devices, fits) == counts


@pytest.mark.slow
def test_a_plan_that_rhino_cut_runs_as_one_device(plan):
    rng = np.random.default_rng(0)
    params = [
        rng.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
        for _ in range(LAYERS)
    ]
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    assert plan.check(train_step, params, x).ok


def test_stages_that_cannot_gain_are_refused_before_they_are_planned(hardware):
    """By one search of a micro-batch; what a step takes at least is told."""
    plan = planned(f"{hardware(slow=2e10)}:2x2", level="fast")
    assert len(plan.stages) == 1
    assert "2: at least " in plan.notes[-1]
