from __future__ import annotations

from pathlib import Path

import pytest

from rhino_jax.verify.hlo.module import parse_module, type_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[8,128]{1,0}", 4096),
        ("bf16[3]{0:T(1024)(128)(2,1)S(1)}", 6),
        ("f32[]", 4),
        ("pred[7]", 7),
        ("s4[3]{0:E(4)}", 2),
        ("f8e4m3fn[4,4]{1,0}", 16),
        ("c64[2]", 16),
        ("token[]", 0),
        ("f32[<=8,2]{1,0}", 64),
        ("(f32[2]{0}, (s32[], /*index=2*/u8[3]{0}))", 15),
        ("f32[0,5]", 0),
    ],
)
def test_bytes_of_types(text: str, size: int) -> None:
    assert type_bytes(text) == size


def test_an_unknown_element_type_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown element type 'q7'"):
        type_bytes("q7[3]")


MODULE = (Path(__file__).parent / "metadata.hlo").read_text()


def test_computations_and_instructions() -> None:
    module = parse_module(MODULE)
    assert module.entry == "main"
    assert module.num_partitions == 4
    assert set(module.computations) == {"add", "main"}
    main = module.computations["main"]
    assert main.root == "t.1"
    assert [i.name for i in main] == ["a", "c", "text", "old", "ar", "t.1"]
    assert main.instructions["old"].operands == ("a", "a")
    assert main.instructions["ar"].operands == ("a", "old")
    assert main.instructions["ar"].bytes == 64
    assert main.instructions["ar"].attribute("to_apply") == "add"


def test_metadata_gives_name_and_source_and_does_not_leak() -> None:
    main = parse_module(MODULE).computations["main"]
    assert main.instructions["old"].source == "model.py:7"
    assert main.instructions["ar"].source == "train.py:41 (body)"
    assert main.instructions["ar"].op_name.startswith("jit(f)/psum")
    assert "{{9}}" not in main.instructions["ar"].attributes
    assert "{{0,1,2,3}}" in main.instructions["ar"].attributes
    assert '"flag"' in main.instructions["ar"].attributes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the text of an HLO module"),
        ("module @jit_f { func.func public @main() }", "not the text of an HLO module"),
        ("HloModule x\n\n%f (x: f32[]) -> f32[] {\n}\n", "no ENTRY"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_module(text)


def test_metadata_of_kernels_on_lines_of_their_own_is_part_of_an_instruction() -> None:
    """As JAX's splash attention states it (libtpu 0.0.52)."""
    module = parse_module(
        "HloModule step, is_scheduled=true\n"
        "\n"
        "ENTRY %main (x: f32[8]) -> f32[8] {\n"
        "  %x = f32[8]{0} parameter(0)\n"
        '  %kernel = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call",'
        " frontend_attributes={kernel_metadata={\n"
        '"xprof_metadata":"{\\"block_q\\": 128}"\n'
        '}}, metadata={op_name="jit(step)/pallas_call"}\n'
        "  ROOT %y = f32[8]{0} negate(%kernel)\n"
        "}\n"
    )
    (entry,) = module.computations.values()
    assert [x.name for x in entry] == ["x", "kernel", "y"] and entry.root == "y"
    assert entry.instructions["kernel"].op_name == "jit(step)/pallas_call"
