from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rhino_jax.errors import MeshError
from rhino_jax.verify.hlo.collectives.groups import map_mesh, parse_groups, parse_pairs


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups={{0,1}, {2,3}}", ((0, 1), (2, 3))),
        ("replica_groups={{3,1,0,2}}", ((3, 1, 0, 2),)),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("channel_id=1", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4], use_global_device_ids=true", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=[4,1]<=[4]", ((0,), (1,), (2,), (3,))),
        ("replica_groups=mesh['x'=2,'y'=2] {'y'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['x'=2,'y'=2] {'x'}, to_apply=%f", ((0, 2), (1, 3))),
        ("replica_groups=mesh['x'=2,'y'=2] {'x','y'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['x'=2,'y'=2] {'y','x'}", ((0, 2, 1, 3),)),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'a'}", ((0, 2), (1, 3))),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}",
            ((0, 2), (1, 3)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}",
            ((3, 2), (1, 0)),
        ),
        ("replica_groups=mesh['x'=4] {'x':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['x'=4] {'x':(2)2}", ((0, 1), (2, 3))),
    ],
)
def test_spellings_of_groups(text: str, groups) -> None:
    assert parse_groups(text, 4) == groups


def test_an_unknown_spelling_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot read the replica groups"):
        parse_groups("replica_groups=<<0,1>>", 4)


def test_pairs() -> None:
    assert parse_pairs("source_target_pairs={{0,1},{1,0}}, metadata") == (
        (0, 1),
        (1, 0),
    )


SHAPES = [(8,), (2, 4), (2, 2, 2), (3, 1, 4), (2, 3, 4, 2)]


def subsets(count: int):
    return itertools.chain.from_iterable(
        itertools.combinations(range(count), n) for n in range(1, count + 1)
    )


@pytest.mark.parametrize(
    ("shape", "axes"), [(s, a) for s in SHAPES for a in subsets(len(s))]
)
def test_three_spellings_of_the_same_axes_agree(shape, axes) -> None:
    size = math.prod(shape)
    names = "abcd"[: len(shape)]
    rest = [i for i in range(len(shape)) if i not in axes]
    grid = np.arange(size).reshape(shape).transpose([*rest, *axes])
    table = grid.reshape(-1, math.prod(shape[a] for a in axes))

    def text(values) -> str:
        return ",".join(str(v) for v in values)

    as_list = "{" + ",".join("{" + text(row) + "}" for row in table) + "}"
    as_iota = f"[{text(table.shape)}]<=[{text(shape)}]T({text([*rest, *axes])})"
    mesh = ",".join(f"'{n}'={s}" for n, s in zip(names, shape, strict=True))
    as_mesh = f"mesh[{mesh}] {{{','.join(repr(names[a]) for a in axes)}}}"
    found = {
        parse_groups(f"replica_groups={spelling}, x=1", size)
        for spelling in (as_list, as_iota, as_mesh)
    }
    assert len(found) == 1
    mapped = map_mesh(tuple(zip(names, shape, strict=True)))
    moved = tuple(names[a] for a in axes if shape[a] > 1)
    assert mapped.axes_of(found.pop()) == (moved, True)


@given(st.permutations(range(8)))
def test_device_ids_give_the_mesh_order(ids) -> None:
    mesh = map_mesh((("x", 2), ("y", 4)), ids)
    rows = tuple(tuple(ids[4 * i : 4 * i + 4]) for i in range(2))
    assert mesh.axes_of(rows) == (("y",), True)
    columns = tuple(tuple(ids[j::4]) for j in range(4))
    assert mesh.axes_of(columns) == (("x",), True)


def test_part_of_an_axis_is_told() -> None:
    mesh = map_mesh((("x", 8),))
    assert mesh.axes_of(((0, 1, 2, 3), (4, 5, 6, 7))) == (("x",), False)


def test_pairs_move_along_axes() -> None:
    mesh = map_mesh((("x", 2), ("y", 2)))
    assert mesh.axes_of(((0, 1), (1, 0), (2, 3)))[0] == ("y",)
    assert mesh.axes_of(((0, 2),))[0] == ("x",)
    assert mesh.axes_of(((1, 1),))[0] == ()


def test_other_devices_are_refused() -> None:
    with pytest.raises(MeshError, match="device 4 in a replica group; the mesh has 4"):
        map_mesh((("x", 4),)).axes_of(((0, 4),))
