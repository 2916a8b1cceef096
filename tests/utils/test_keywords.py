"""Every keyword takes what it means, in every spelling, and refuses all else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.utils.keywords import read_bytes, read_count, read_seconds


class Mute:
    """Has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Uncertain:
    """Is neither true nor false, nor equal to anything."""

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")


ODD: list[Any] = [
    True, 0, -1, 1.5, float("nan"), float("inf"), "a", "", "5", "1GB", b"x", [1], {},
    {"x": 1.5}, {1: 2}, {"x": True}, {"": 2}, np.ones(3), np.float32(2), jnp.ones(()),
    Mute(), Uncertain(), object, 10**400, {0}, P("data"), [None], [[1]], slice(1), ...,
    1j, Path("/no/such/file"), None,
]  # fmt: skip

FINE: dict[str, list[Any]] = {
    "mesh": [None],
    "hardware": [None],
    "memory_budget_bytes": ["1GB", None],
    "pins": [{}, None],
    "level": [None],
    "time_limit_s": [1.5, "5", np.float32(2), None],
    "seed": [0],
    "refine": [0],
    "microbatches": [None],
    "stages": [None],
    "schedule": [None],
    "recompute": [None],
    "storage": [None],
    "per_microbatch": [None],
    "while_trips": [0, None],
    "donate_argnums": [0, -1, [1], {0}, None],
    "donate_argnames": [None],
    "static_argnums": [None],
    "static_argnames": [None],
    "progress": [True, None],
    "dump": ["a", "5", "1GB", None],
}
"""What of `ODD` each keyword takes; None stands last and is taken by its default."""

SHAPE = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def step(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w), w * 2


def planned(**options: Any) -> rhino.Plan:
    usual = {"mesh": {"data": 4, "model": 2}, "level": "fast", "progress": False}
    return rhino.plan(step, SHAPE, SHAPE, **(usual | options))


@pytest.mark.parametrize("keyword", FINE)
def test_odd_values_are_refused_in_four_parts(
    keyword: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fine = FINE[keyword]
    for value in ODD[:-1]:
        if any(type(value) is type(f) and value == f for f in fine):
            assert planned(**{keyword: value})
            continue
        if keyword == "static_argnums" and type(value) in (int, list, set):
            continue  # positions, but of arrays
        with pytest.raises(rhino.RhinoError) as caught:
            planned(**{keyword: value})
        assert caught.value.fix and caught.value.numbers


def test_odd_values_elsewhere() -> None:
    plan = planned()
    calls: list[Any] = [
        rhino.load_plan,
        plan.diff,
        plan.with_mesh,
        rhino.load_target,
        rhino.compile_target,
        lambda x: plan.save(x),
        lambda x: rhino.check_rule(x, 1.0),
        lambda x: plan.verify(x, SHAPE, SHAPE),
        lambda x: plan.verify(step, SHAPE, SHAPE, compile_for=x),
        lambda x: plan.jit(x),
        lambda x: plan.init(x),
        lambda x: plan.check(x, SHAPE, SHAPE),
        lambda x: rhino.plan(x, SHAPE, SHAPE),
        lambda x: rhino.audit(x, SHAPE, SHAPE),
        lambda x: rhino.register_rule(x, "a -> a"),
        lambda x: rhino.register_rule("test_odd_values", x),
        lambda x: rhino.register_rule("test_odd_values", "a -> a", flops=x),
        lambda x: rhino.register_rule("test_odd_values", "a -> a", reducers=x),
    ]
    fine = (str, Path, type, type(None), dict)
    for i, call in enumerate(calls):
        for value in ODD:
            if isinstance(value, fine):
                continue
            with pytest.raises(rhino.RhinoError) as caught:
                call(value)
            assert caught.value.fix, (i, value)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("1GB", 10**9), ("16GiB", 16 * 2**30), ("12e9", 12 * 10**9),
        (" 1.5 gib ", 3 * 2**29), ("1_000", 1000), ("2,048 KiB", 2**21), (5.4, 5),
        (np.int64(7), 7), (np.float64(7e9), 7 * 10**9), (None, None),
    ],
)  # fmt: skip
def test_sizes(value: Any, found: int | None) -> None:
    assert read_bytes("f", "memory_budget_bytes", value) == found


@pytest.mark.parametrize(
    ("value", "found"), [("5", 5), ("300ms", 0.3), ("2 min", 120), (3, 3), (0.5, 0.5)]
)
def test_times(value: Any, found: float) -> None:
    assert read_seconds("f", "time_limit_s", value) == found


@pytest.mark.parametrize("value", ["16G", "GiB", "-1GB", "0", "1e999", "nan", "1 2"])
def test_sizes_that_are_none(value: str) -> None:
    with pytest.raises(rhino.RhinoError, match=r"(?s)positive size.*16GiB"):
        read_bytes("f", "memory_budget_bytes", value)


def test_counts_have_a_range() -> None:
    assert read_count("f", "seed", np.int32(4), most=5) == 4
    with pytest.raises(rhino.RhinoError, match=r"0 to 5"):
        read_count("f", "seed", 6, most=5)


@pytest.mark.parametrize("stages", [16, 10**12, 10**400, (8, 8), [0, 8], "two"])
def test_stages_that_cannot_be(stages: Any) -> None:
    with pytest.raises(rhino.RhinoError) as caught:
        planned(mesh=None, stages=stages)
    assert caught.value.where.strip("`") == "stages=" and caught.value.fix
    assert len(caught.value.numbers) < 200


def test_a_budget_in_words_binds() -> None:
    assert planned(memory_budget_bytes="1GiB").memory_budget_bytes == 2**30
    with pytest.raises(rhino.InfeasiblePlanError):
        planned(memory_budget_bytes="100 B")


def mesh() -> Any:
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)


def train(params: Any, *, batch: Any) -> Any:
    return {"w": params["w"] * batch["x"].sum(), "b": params["b"]}


def train_shapes() -> Any:
    return {"w": SHAPE, "b": SHAPE}, {"x": SHAPE}


@pytest.mark.parametrize(
    "pins",
    [
        {"params['w']": P(None, "model"), "batch['x']": P("data")},
        {"params": {"w": P(None, "model"), "b": None}, "batch": {"x": P("data")}},
        {"params": {"w": P(None, "model")}, "batch": {"x": ("data", None)}},
        (({"w": P(None, "model"), "b": None},), {"batch": P("data")}),
        (({"w": P(None, "model"), "b": None},), {"batch": {"x": P("data")}}),
        {"params": {"w": NamedSharding(mesh(), P(None, "model"))},
         "batch": {"x": NamedSharding(mesh(), P("data"))}},
    ],
)  # fmt: skip
def test_pins_of_every_form(pins: Any) -> None:
    params, batch = train_shapes()
    plan = rhino.plan(
        train, params, batch=batch, pins=pins, mesh=mesh(), progress=False
    )
    args, kwargs = plan.in_specs
    assert args[0]["w"] == P(None, "model") and kwargs["batch"]["x"] == P("data")
    assert rhino.plan(
        train, params, batch=batch, pins=plan.in_specs, mesh=mesh(), progress=False
    ).in_specs == (args, kwargs)


def test_a_spec_may_stand_for_a_subtree() -> None:
    plan = planned(pins=(P("data"), None))
    assert plan.in_specs[0] == P("data")
    params, batch = train_shapes()
    plan = rhino.plan(
        train, params, batch=batch, pins=((P("data"),), {"batch": None}), mesh=mesh(),
        progress=False,
    )  # fmt: skip
    assert plan.in_specs[0][0] == {"w": P("data"), "b": P("data")}


@pytest.mark.parametrize(
    ("pins", "match"),
    [
        ((P("data"),), "shape of the arguments"),
        ((P("data"), {"x": P()}), "shape of the arguments"),
        ({"v": {"a": P()}}, r"v\['a'\]. matches no argument"),
        ({"w": {"a": None}}, r"matches no argument"),
        ({"w": NamedSharding(jax.make_mesh((8,), ("z",)), P("z"))}, "another mesh"),
        ({"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])}, "PartitionSpec"),
        ({"w": P("data", unreduced={"model"})}, "whole values"),
        ({"w": P(P.UNCONSTRAINED)}, "leaves a dim of an argument"),
        ({"w": 3}, "PartitionSpec"),
    ],
)
def test_pins_that_do_not_fit(pins: Any, match: str) -> None:
    with pytest.raises(rhino.PinError, match=match) as caught:
        planned(pins=pins)
    assert caught.value.fix and caught.value.numbers


def test_a_sharding_over_other_devices_is_refused() -> None:
    turned = jax.sharding.Mesh(
        mesh().devices[::-1], ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    with pytest.raises(rhino.PinError, match="other devices"):
        planned(pins={"w": NamedSharding(turned, P("data"))}, mesh=mesh())
