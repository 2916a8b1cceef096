"""The user's line of an instruction, not that of what lies between."""

from __future__ import annotations

import jax
import optax
from jax.sharding import AxisType, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.verify.hlo.module import parse_frames
from tests.verify.hlo.collectives_of import read_collectives


TABLES = """\
FileNames
1 "/home/me/train.py"
2 "/venv/lib/python3.12/site-packages/optax/_src/update.py"
3 "/home/me/optax/mine.py"

FunctionNames
1 "<module>"
2 "train.<locals>.step"
3 "apply_updates"

FileLocations
1 {file_name_id=1 function_name_id=1 line=40 end_line=40 column=0 end_column=9}
2 {file_name_id=1 function_name_id=2 line=12 end_line=12 column=0 end_column=9}
3 {file_name_id=2 function_name_id=3 line=99 end_line=99 column=0 end_column=9}
4 {file_name_id=3 function_name_id=3 line=7 end_line=7 column=0 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=3 parent_frame_id=1}

ENTRY %main () -> f32[] {
"""


def test_lines_of_libraries_give_way_to_the_line_that_calls_them() -> None:
    frames = parse_frames(TABLES.splitlines())
    assert frames[2] == frames[3] == "train.py:12 (step)"
    # A folder of that name which is not installed is the user's.
    assert frames[4] == "mine.py:7 (apply_updates)"
    # Nobody but the library is there.
    assert frames[5] == "update.py:99 (apply_updates)"


def test_what_moves_at_the_end_is_on_the_line_that_made_it() -> None:
    """Outputs that are pinned whole are gathered where optax added them up."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return optax.apply_updates(w.astype("bfloat16"), x)

    sharded = rhino.auto_shard(
        step,
        mesh=mesh,
        hardware="v5e",
        pins={"w": P("x", "y"), "x": P("x", "y"), "out": P()},
        progress=False,
    )
    args = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    plan = sharded.plan(*args)
    found = read_collectives(sharded.lower(*args).compile().as_text(), plan.mesh_axes)
    line = f"test_locations.py:{step.__code__.co_firstlineno + 1} (step)"
    assert {c.source for c in found if c.kind == "all-gather"} == {line}
