from __future__ import annotations

import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.commands.loading import ShapesError, parse_shapes, read_shapes


def parse(text: str):
    return parse_shapes(tomllib.loads(text), "shapes.toml")


def array(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_the_whole_format() -> None:
    shapes = parse("""
        init = "train:init"
        donate_argnums = [0, 1]

        [[args]]
        tokens = "int32[64, 1024]"
        [args.targets]
        labels = ["bfloat16[]", "bool[3]"]

        [[args]]

        [kwargs]
        mask = "bool[64,1024]"
        rate = 0.1
        deterministic = true
    """)
    assert shapes.init == "train:init"
    assert shapes.options == {"donate_argnums": (0, 1)}
    assert shapes.args == (
        {
            "tokens": array((64, 1024), jnp.int32),
            "targets": {"labels": [array((), jnp.bfloat16), array((3,), jnp.bool)]},
        },
        {},
    )
    assert shapes.kwargs == {
        "mask": array((64, 1024), jnp.bool),
        "rate": 0.1,
        "deterministic": True,
    }


def test_arguments_in_place() -> None:
    shapes = parse('args = ["float32[8,128]", {w = "float32[128]"}, 3]')
    assert shapes.args == (array((8, 128)), {"w": array((128,))}, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('argz = ["float32[8]"]', "unknown key `argz`. Did you mean 'args'"),
        ('args = ["float32(8)"]', r"`args\[0\]` is no array"),
        ('args = ["float32[8,]"]', r"`args\[0\]` is no array"),
        ('args = ["float32[-8]"]', r"`args\[0\]` is no array"),
        ('[[args]]\nw = {b = "floot32[8]"}', r"`args\[0\].w.b` has an unknown element"),
        ('args = "float32[8]"', "`args` is not a list"),
        ("kwargs = []", "`kwargs` is not a table"),
        ("init = 3", "`init` is not 'module:function'"),
        ("donate_argnums = [true]", "`donate_argnums` is not a list of positions"),
        ("donate_argnums = 0", "`donate_argnums` is not a list of positions"),
        ("[kwargs]\nday = 2020-01-01", "`kwargs.day` is not an array, a number"),
    ],
)
def test_malformed_files_name_the_key(text: str, message: str) -> None:
    with pytest.raises(ShapesError, match=message) as error:
        parse(text)
    assert "shapes.toml" in error.value.where
    assert error.value.fix


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "shapes.toml").write_text("")
    with pytest.raises(ShapesError, match="Did you mean 'shapes.toml'"):
        read_shapes(tmp_path / "shape.toml")


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("args = [")
    with pytest.raises(ShapesError, match="cannot be read"):
        read_shapes(tmp_path / "x.toml")
