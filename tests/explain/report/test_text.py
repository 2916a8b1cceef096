from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rhino_jax.explain.report.text import (
    MAX_WIDTH,
    display_width,
    wrapped,
)
from rhino_jax.ir.transform import Transform
from rhino_jax.plan.plan import Leaf
from rhino_jax.plan.records import (
    Collective,
    Coverage,
    PeakValue,
    Predicted,
    SearchReport,
)
from rhino_jax.plan.stages import StageSend
from rhino_jax.verify.results.check import Check, ComparedLeaf
from tests.plan.samples import sample_plan, sample_stage


def lines_of(text: str, title: str) -> list[str]:
    """The lines of the section whose title starts so."""
    for section in text.split("\n\n"):
        if section.startswith(title):
            return section.splitlines()
    raise AssertionError(f"no section {title!r} in\n{text}")


def test_the_table_tells_the_whole_story() -> None:
    text = sample_plan().table()
    titles = [s.splitlines()[0].split(":")[0] for s in text.split("\n\n")]
    assert titles == [
        "plan of train_step",
        "compared with the experts' recipes",
        "inputs",
        "outputs",
        "collectives",
        "where they come from",
        "memory at the peak",
        "mesh shapes compared",
        "forms, micro-batches, remat and offload compared",
        "pins",
        "coverage",
        "search",
        "notes",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "data=4 × model=2 (8 devices)",
        "12.3 ms: compute 10.0 ms, communication not hidden 2.30 ms",
        "3.00 GiB per device, of 16.0 GiB (18.8 %)",
        "opt_state[0].mu['w2']",
        "f32[512,128]",
        "P(('model', 'data'))",
        "model.py:12 (mlp)",
        "partial sum over batch",
        "my_kernel (3x)",
        "memory at the peak: 3.00 GiB of 16.0 GiB per device",
        "42 Boolean variables",
        "gap 0.8 %",
        "`my_kernel` has no rule: it is replicated.",
        "transforms   dead code (40 → 38 ops)",
    ],
)
def test_what_stands_in_the_table(words: str) -> None:
    assert words in sample_plan().table()


def test_transforms_are_told_where_there_are_any() -> None:
    assert "transforms" not in sample_plan(transforms=()).table()
    both = (Transform("no-ops", 40, 38), Transform("merged dims", 38, 1044))
    (line,) = [
        line
        for line in sample_plan(transforms=both).table().splitlines()
        if "transforms" in line
    ]
    assert line.endswith("no-ops (40 → 38 ops), merged dims (38 → 1,044 ops)")


def test_stages_are_told_where_there_are_several() -> None:
    stage = dataclasses.replace(sample_stage(), devices=(0, 1, 2, 3))
    first = dataclasses.replace(stage, sends=(StageSend(1, "h", 3 * 2**20, 1e-4),))
    rows = lines_of(sample_plan(stages=(first, stage)).table(), "stages")[2:]
    assert rows[0].split()[:4] == ["0", "data=4", "×", "model=2"]
    assert rows[0].endswith("3.00 MiB to 1")
    assert "10.0 ms" in rows[1] and "3.00 GiB" in rows[1]


def test_recipes_stand_fastest_first_with_ratio_and_fit() -> None:
    rows = lines_of(sample_plan().table(), "compared with the experts")[2:]
    assert [row.split()[0] for row in rows] == [">", "fsdp", "dp", "megatron"]
    assert "1.06x" in rows[1] and rows[1].endswith("yes")
    assert rows[2].endswith("no: over budget")
    assert rows[3].endswith("not possible here")


def layered_plan(layers: int = 40):
    leaves = tuple(
        Leaf(f"params['h'][{i}]['{name}']", (64, n), "bfloat16", ((0,), ()), 128 * n)
        for i in range(layers)
        for name, n in (("up", 512), ("down", 256))
    )
    others = tuple(
        Leaf(f"x{'abcdefgh'[i % 8]}{'abcdefgh'[i // 8]}", (i + 1,), "int32", ((),), 4)
        for i in range(40)
    )
    return sample_plan(inputs=(*leaves, *others))


def test_repeated_layers_are_folded_biggest_first() -> None:
    rows = lines_of(layered_plan().table(), "inputs")
    assert rows[2].split()[:3] == ["params['h'][0..39]['up']", "40x", "bf16[64,512]"]
    assert rows[2].endswith("2.50 MiB")
    assert rows[3].split()[0] == "params['h'][0..39]['down']"
    assert rows[-1] == "  and 18 more: 72 B per device"


def test_the_full_table_shows_every_value() -> None:
    text = layered_plan().table(full=True)
    assert all(f"params['h'][{i}]['up']" in text for i in range(40))
    assert "more:" not in text


def test_state_that_is_fed_back_is_not_listed_twice() -> None:
    plan = sample_plan()
    state = [dataclasses.replace(x, path=f"out: {x.path}") for x in plan.inputs]
    moved = dataclasses.replace(state[0], spec=((), ()))
    loss = Leaf("out[1]", (), "float32", (), 4)
    plan = sample_plan(outputs=(moved, *state[1:], loss))
    rows = lines_of(plan.table(), "outputs: 2 arrays")
    assert [row.split()[0] for row in rows[2:4]] == ["out:", "out[1]"]
    assert rows[4] == "  5 of state, with the specs of the inputs they replace"
    assert len(lines_of(plan.table(full=True), "outputs: 7 arrays")) == 9


def collective(i: int, line: int) -> Collective:
    return Collective(
        "all-reduce", ("data",), 2**20, 1, 1e-3 / (1 + i), f"dot %{i}", f"m.py:{line}"
    )


def test_collectives_of_one_line_are_summed() -> None:
    plan = sample_plan(collectives=tuple(collective(0, 7) for _ in range(5)))
    row, why = lines_of(plan.table(), "where")[2:]
    assert why == "      dot %0"
    assert row.split()[:5] == ["all-reduce", "data", "5", "5.00", "MiB"]
    assert "5.00 ms" in row and "m.py:7" in row


def test_reasons_stand_whole_below_their_rows() -> None:
    reason = "gathers params['encoder']['up']: P(None, ('data', 'model')) → P('data')"
    sent = dataclasses.replace(collective(0, 7), reason=reason)
    rows = lines_of(sample_plan(collectives=(sent,)).table(), "where")
    assert rows[3] == f"      {reason}"


def test_reasons_that_differ_in_the_layer_are_one() -> None:
    sent = [
        dataclasses.replace(collective(0, 7), reason=f"gradient of h[{i}]['w']: sum")
        for i in range(12)
    ]
    other = dataclasses.replace(collective(0, 7), reason="gathers x: P('a') → P()")
    rows = lines_of(sample_plan(collectives=(other, *sent)).table(), "where")
    assert rows[3:] == ["      gradient of h[0..11]['w']: sum; and 1 more"]


def test_many_collectives_are_cut_with_what_was_left_out() -> None:
    plan = sample_plan(collectives=tuple(collective(i, i) for i in range(20)))
    rows = lines_of(plan.table(), "where")
    left_s = sum(1e-3 / (1 + i) for i in range(12, 20))
    assert rows[-1] == f"  and 8 more: {left_s * 1e6:.0f} µs"
    assert len(lines_of(plan.table(full=True), "where")) == 2 + 2 * 20


def test_no_collectives_are_said_to_be_none() -> None:
    assert "no device talks to another" in sample_plan(collectives=()).table()


def test_holdings_are_cut_with_what_was_left_out() -> None:
    held = tuple(PeakValue(f"v{i}", 2**20) for i in range(30))
    rows = lines_of(sample_plan(at_peak=held).table(), "memory")
    assert rows[-1] == "  and 20 more: 20.0 MiB"


def test_the_chosen_mesh_shape_is_named() -> None:
    rows = lines_of(sample_plan().table(), "mesh shapes")
    assert rows[2].startswith("> data=4 × model=2  ")
    assert rows[3].startswith("  8 ")


def bare_plan():
    """As little as a plan can hold."""
    zero = Predicted(0.0, 0.0, 0.0, 0, 0.0)
    return sample_plan(
        mesh_axes=(),
        inputs=(),
        outputs=(),
        predicted=zero,
        collectives=(),
        search=SearchReport("pinned", 0.0, 0.0, 0.0, 0.0, 0),
        coverage=Coverage(1.0, 1.0, 1.0),
        recipes={"dp": zero},
        memory_budget_bytes=0,
        at_peak=(),
        pins={},
        meshes=(),
        notes=(),
    )


def test_a_bare_plan_can_be_read() -> None:
    plan = bare_plan()
    assert "one device" in str(plan)
    assert "pinned: nothing was left to choose" in plan.table()
    assert plan._repr_html_()


def test_infinite_and_unknown_numbers_can_be_read() -> None:
    search = dataclasses.replace(sample_plan().search, gap=math.inf, bound_s=math.nan)
    text = sample_plan(search=search).table()
    assert "gap ∞" in text and "proved bound ?" in text


names = st.text(min_size=0, max_size=160)


@settings(max_examples=20, deadline=None)
@given(names, names, names)
def test_no_line_is_wider_than_promised(program: str, path: str, source: str) -> None:
    plan = sample_plan()
    leaf = dataclasses.replace(plan.inputs[0], path=path)
    plan = dataclasses.replace(
        plan,
        program_name=program,
        inputs=(leaf, *plan.inputs[1:]),
        collectives=(
            dataclasses.replace(plan.collectives[0], source=source, reason=path),
        ),
        at_peak=(PeakValue(path, 5, source),),
        pins={path: program},
        notes=(source,),
        mesh_axes=tuple((f"a_long_axis_name_{i}", 2) for i in range(9)),
    )
    for text in (plan.table(), plan.table(full=True)):
        assert max(display_width(line) for line in text.splitlines()) <= MAX_WIDTH


@given(st.text(), st.integers(2, 60))
def test_wrapped_text_fits_and_is_whole(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert max(map(display_width, lines)) <= width
    assert "".join("".join(lines).split()) == "".join(
        c for c in text if c.isprintable() and not c.isspace()
    )


def test_paths_break_before_keys_and_specs_between_dims() -> None:
    path = "params['layers'][0]['attention']['out']"
    assert wrapped(path, 39) == [path]
    assert wrapped(path, 30) == ["params['layers'][0]", "['attention']['out']"]
    spec = "P(None, ('data', 'model'), 'stage')"
    assert wrapped(spec, 20) == ["P(None, ('data',", "'model'), 'stage')"]


DEEP = "opt_state[0].{}['transformer']['blocks']['attention']['projection']['kernel']"


def deep_plan() -> Any:
    """Rows that differ in the middle of long paths, or of long specs alone."""
    axes = (("replica_of_data", 2), ("model_parallel", 2), ("sequence_parallel", 2))
    specs = ((), (0, 1), (2,)), ((), (0, 2), (1,))
    leaves = tuple(
        Leaf(DEEP.format(moment), (32, 4096, 3, 128), "bfloat16", (*spec, ()), 4)
        for moment in ("mu", "nu")
        for spec in specs
    )
    held = tuple(
        PeakValue(f"{leaf.path} resharded", 2**20, "m.py:7") for leaf in leaves
    )
    pins = {leaf.path: "P(None, 'replica_of_data')" for leaf in leaves}
    stage = dataclasses.replace(sample_stage(), mesh_axes=axes)
    return sample_plan(
        mesh_axes=axes, stages=(stage,), inputs=leaves, at_peak=held, pins=pins
    )


@pytest.mark.parametrize("full", [False, True])
def test_nothing_is_cut_and_long_paths_stay_whole(full: bool) -> None:
    plan = deep_plan()
    text = plan.table(full=full)
    assert "…" not in text
    rows = lines_of(text, "inputs")
    for leaf in plan.inputs:
        assert sum(leaf.path in line for line in rows) == 2
        assert leaf.path in "\n".join(lines_of(text, "pins"))
    whole = " ".join(" ".join(rows).split())
    for word in ("('replica_of_data',", "'model_parallel'),", "'sequence_parallel'),"):
        assert word in whole


def test_checks_print_paths_whole_and_their_reasons_too() -> None:
    paths = [DEEP.format(moment) for moment in ("mu", "nu")]
    leaves = tuple(
        ComparedLeaf(
            path, (32, 4096, 3, 128), "bfloat16", 0.1, 0.2, 1e-4, (1, 2, 3, 4), 7
        )
        for path in paths
    )
    why = "its elements are random, and the two runs draw other numbers than each other"
    left = ((f"{paths[0]}.key", why),)
    found = Check(
        program_name="step",
        mesh_axes=(("data", 4),),
        devices="4 CPUs",
        leaves=leaves,
        not_compared=left,
        seconds=1.0,
    )
    lines = found.table().splitlines()
    assert max(map(display_width, lines)) <= MAX_WIDTH
    for path in (*paths, f"{paths[0]}.key"):
        assert any(line.strip(" >") == path for line in lines)
    assert why in " ".join(found.table().split())


def test_columns_are_aligned_with_wide_characters() -> None:
    plan = sample_plan()
    leaf = dataclasses.replace(plan.inputs[0], path="パラメータ")
    rows = lines_of(sample_plan(inputs=(leaf, *plan.inputs[1:])).table(), "inputs")[1:]
    assert len({display_width(row) for row in rows}) == 1
