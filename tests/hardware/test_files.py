"""Hardware files: what ships, names, topologies, devices, and every refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rhino_jax.errors import HardwareError
from rhino_jax.hardware import files
from rhino_jax.hardware.files import (
    configs_dir,
    hardware_names,
    load_target,
)
from rhino_jax.hardware.target import Target


GOOD = """
matmul_efficiency = 0.5
memory_efficiency = 0.5

[peak_flops_per_s]
float32 = 1e12

[memory]
hbm_bytes = 5e9
hbm_bytes_per_s = 1e12

[[tiers]]
name = "fast"
size = 4
alpha_s = 1e-6
bytes_per_s = 1e11

[[tiers]]
name = "slow"
alpha_s = 1e-5
bytes_per_s = 1e10
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_the_hardware_ships() -> None:
    expected = {"v4", "v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200", "b200"}
    assert expected | {"cpu", "v100-16gb"} <= set(hardware_names())


@pytest.mark.parametrize("name", hardware_names())
def test_shipped_files_load(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    assert target.device.kinds
    assert 0 < target.device.hbm_bytes < 2**40
    assert 0 < target.device.matmul_efficiency <= 1
    # Outer tiers are slower: axes fill tiers from the fastest.
    rates = [t.bytes_per_s for t in target.tiers]
    assert rates == sorted(rates, reverse=True)
    assert target.tiers[-1].size is None


@pytest.mark.parametrize("name", hardware_names())
def test_every_number_that_ships_has_its_source(name: str) -> None:
    lines = (configs_dir() / "hardware" / f"{name}.toml").read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        value = line.split("#")[0].partition("=")[2].strip()
        if value[:1].isdigit():
            assert "#" in line or above.startswith("#"), f"{name}.toml: {line}"


@pytest.mark.parametrize("name", sorted(set(hardware_names()) - {"cpu"}))
def test_prices_say_where_and_when_they_were_read(name: str) -> None:
    before, _, _ = (
        (configs_dir() / "hardware" / f"{name}.toml")
        .read_text()
        .partition("price_per_hour")
    )
    said = before[before.rindex("# US dollars an hour, on demand") :]
    said = said.replace("\n# ", " ")
    assert re.search(r"(github\.com|huggingface\.co|google\.com)/\S+", said)
    assert re.search(r"read on 20\d\d-\d\d-\d\d", said)
    assert ("us-central" in said) != ("Assumed, without a public source" in said)


def test_published_figures() -> None:
    assert load_target("v5e").device.hbm_bytes == 15.75 * 2**30
    assert load_target("v5e").peak_flops_per_s("bfloat16") == 197e12
    assert load_target("h100").tiers[0].bytes_per_s == 450e9
    assert load_target("h100").tiers[0].size == 8
    assert load_target("a100").tiers[1].bytes_per_s == 25e9
    v100 = load_target("v100-16gb:8x8")
    # A host of a p3.16xlarge has 25 Gb/s.
    assert 8 * 8 * v100.tiers[1].bytes_per_s == 25e9
    assert v100.peak_flops_per_s("float16") == 125e12
    # A chip of TPU7x is two devices.
    assert load_target("tpu7x").peak_flops_per_s("bfloat16") * 2 == 2307e12


def test_no_device_kind_is_claimed_twice() -> None:
    kinds = [k for n in hardware_names() for k in load_target(n).device.kinds]
    assert len(kinds) == len(set(kinds))


def test_a_target_is_returned_as_it_is() -> None:
    target = Target.pure_communication({"x": (0, 1)})
    assert load_target(target) is target


def test_names_in_capitals() -> None:
    assert load_target(" V5e ") == load_target("v5e")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = _write(tmp_path, GOOD)
    target = load_target(path)
    assert target == load_target(str(path))
    assert target.name == "mine"
    assert target.device.hbm_bytes == 5_000_000_000
    assert [t.name for t in target.tiers] == ["fast", "slow"]
    assert load_target(f"{path}:3x4").num_devices == 12


def test_unlimited_compute_and_links_by_axis_in_a_file(tmp_path: Path) -> None:
    text = GOOD.split("[[tiers]]")[0].replace("1e12", "inf")
    text += '[links.data]\nalpha_s = 0\nbytes_per_s = 1e9\ntopology = "ring"\n'
    target = load_target(_write(tmp_path, text))
    assert target.peak_flops_per_s("float32") == float("inf")
    assert target.tiers == ()
    assert dict(target.links)["data"].topology == "ring"


def test_a_torus_in_a_file(tmp_path: Path) -> None:
    torus = 'topology = "torus"\ndims = [2, 3]\nwrap_multiple = 0\n'
    text = GOOD.replace('name = "slow"\n', f'name = "slow"\n{torus}')
    tier = load_target(_write(tmp_path, text)).tiers[1]
    assert (tier.dims, tier.rank, tier.size) == ((2, 3), 2, 24)
    assert tier.wraps((2, 3)) == (False, False)


def test_a_single_torus_cannot_be_several_slices(tmp_path: Path) -> None:
    text = GOOD.split("[[tiers]]")[0] + (
        '[[tiers]]\nname = "ici"\ntopology = "torus"\ndims = [4, 4]\n'
        "alpha_s = 0\nbytes_per_s = 1\n"
    )
    path = _write(tmp_path, text)
    assert load_target(f"{path}:2x8").num_devices == 16
    with pytest.raises(HardwareError, match="nothing links several|does not fit"):
        load_target(f"{path}:2x4x4")
    with pytest.raises(HardwareError, match="larger than its links reach"):
        load_target(f"{path}:17")


@pytest.mark.parametrize(
    ("name", "meant"), [("v5pp", "v5p"), ("H10", "h100"), ("v5lite", "v5e")]
)
def test_unknown_names_get_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(HardwareError, match=f"Did you mean '{meant}'") as info:
        load_target(name)
    assert "tpu7x" in info.value.numbers and info.value.fix


def test_a_name_like_nothing_gets_the_list() -> None:
    with pytest.raises(HardwareError, match="not known") as info:
        load_target("zzzzzz")
    assert "Did you mean" not in str(info.value) and "h100" in info.value.numbers


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="cannot be read") as info:
        load_target(tmp_path / "none.toml")
    assert "none.toml" in info.value.where and "No such file" in info.value.numbers


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HardwareError, match="cannot be read"):
        load_target(path)


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="not TOML") as info:
        load_target(_write(tmp_path, GOOD + "alpha_s == 3\n"))
    line = len(GOOD.splitlines()) + 1
    assert f"line {line}" in info.value.numbers and "mine.toml" in info.value.where


FAST = 'name = "fast"'
TORUS = FAST + '\ntopology = "torus"\n'
HBM = "hbm_bytes = 5e9\n"

# (text to replace, its replacement, key in the error, what was expected, what was got)
BAD = [
    ("matmul_efficiency = 0.5\n", "", "matmul_efficiency", "above 0", "nothing"),
    ("memory_efficiency = 0.5", "memory_efficiency = 1.5", "memory_efficiency",
     "at most 1", "1.5"),
    ("matmul_eff", "launch_s = -1\nmatmul_eff", "launch_s", "at least 0", "-1"),
    ("matmul_eff", "clock_hz = 0\nmatmul_eff", "clock_hz", "above 0", "0"),
    ("matmul_eff", "launch = 1\nmatmul_eff", "launch", "launch_s", "1"),
    ("matmul_eff", "name = 3\nmatmul_eff", "name", "a text", "3"),
    ("matmul_eff", 'device_kinds = "x"\nmatmul_eff', "device_kinds", "a list", "'x'"),
    ("float32 = 1e12", "", "peak_flops_per_s", "at least one type", "{}"),
    ("float32 = 1e12", "fp32 = 1.0", "peak_flops_per_s.fp32", "float32", "1.0"),
    ("float32 = 1e12", "float32 = 0", "peak_flops_per_s.float32", "above 0", "0"),
    ("[memory]", "[memory]\nhbm_byts = 1", "memory.hbm_byts", "hbm_bytes", "1"),
    (HBM, "", "memory.hbm_bytes", "whole number", "nothing"),
    (HBM, "hbm_bytes = 0.5\n", "memory.hbm_bytes", "whole number", "0.5"),
    (HBM, "hbm_bytes = inf\n", "memory.hbm_bytes", "whole number", "inf"),
    (HBM, "hbm_bytes = true\n", "memory.hbm_bytes", "whole number", "True"),
    ("[memory]", "[memory]\ntile = 8", "memory.tile", "a list, each", "8"),
    ("[memory]", "[memory]\ntile = [8]", "memory.tile", "rows and lanes", "[8]"),
    ("[memory]", "[memory]\ntile = [0, 128]", "memory.tile", "a list,", "[0, 128]"),
    ("[memory]\n" + HBM + "hbm_bytes_per_s = 1e12", "", "memory", "a table", "nothing"),
    ("alpha_s = 1e-6", 'alpha_s = "1"', "tiers[0].alpha_s", "seconds", "'1'"),
    ("alpha_s = 1e-6", "alpha_s = true", "tiers[0].alpha_s", "seconds", "True"),
    ("alpha_s = 1e-5", "alpha_s = -1", "tiers[1].alpha_s", "at least 0", "-1"),
    ("alpha_s = 1e-5", "alpha_s = nan", "tiers[1].alpha_s", "at least 0", "nan"),
    ("per_s = 1e11", "per_s = 0", "tiers[0].bytes_per_s", "above 0", "0"),
    (FAST, FAST + '\ntopology = "mesh"', "tiers[0].topology", "'torus'", "'mesh'"),
    (FAST, FAST + "\nspeed = 1", "tiers[0].speed", "bytes_per_s", "1"),
    (FAST, "", "tiers[0].name", "a text", "nothing"),
    (FAST, FAST + "\ndims = [4]", "tiers[0].dims", "nothing", "[4]"),
    (FAST, FAST + '\ntopology = "barrier"\nrank = 2', "tiers[0].rank", "barrier", "2"),
    (FAST, TORUS, "tiers[0].dims", "dims", "nothing"),
    (FAST, TORUS + "dims = [2.5]", "tiers[0].dims", "whole number", "[2.5]"),
    (FAST, TORUS + "dims = [2, 2]\nrank = 3", "tiers[0].rank", "2", "3"),
    (FAST, TORUS + "dims = [4, 4]", "tiers[0].size", "16", "4"),
    (FAST, TORUS + "dims = [4]\nwrap_needs_all = 1", "tiers[0].wrap_needs_all",
     "true or false", "1"),
    (FAST, TORUS + "dims = [4]\nwrap_multiple = -4", "tiers[0].wrap_multiple",
     ">= 0", "-4"),
    ("size = 4\n", "", "tiers[0].size", "only the last", "nothing"),
    ("size = 4", "size = 1", "tiers[0].size", ">= 2", "1"),
    ('name = "slow"', 'name = "slow"\nsize = 6', "tiers[1].size", "a multiple of 4",
     "6"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "key", "expected", "got"), BAD)
def test_malformed_files_say_key_expected_and_got(
    tmp_path: Path, old: str, new: str, key: str, expected: str, got: str
) -> None:
    assert GOOD.count(old) >= 1
    path = _write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(HardwareError, match="hardware file") as info:
        load_target(path)
    error = info.value
    assert str(path) in error.where
    assert f"`{key}`" in error.where
    wanted, _, found = error.numbers.partition("got ")
    assert expected in wanted
    assert got in found
    assert error.fix


@pytest.mark.parametrize(
    ("tiers", "got"), [("", "nothing"), ("tiers = []", "[]"), ("tiers = [1]", "1")]
)
def test_files_without_tiers(tmp_path: Path, tiers: str, got: str) -> None:
    text = tiers + GOOD.split("[[tiers]]")[0]
    with pytest.raises(HardwareError, match="tiers") as info:
        load_target(_write(tmp_path, text))
    assert f"got {got}" in info.value.numbers


@pytest.mark.parametrize(
    ("link", "key"),
    [
        ("links = 3", "links"),
        ("[links]\nx = 3", "links.x"),
        ("[links.x]\nalpha_s = 1", "links.x.bytes_per_s"),
        (
            '[links.x]\nalpha_s = 1\nbytes_per_s = 1\ntopology = "torus"',
            "links.x.topology",
        ),
        ("[links.x]\nalpha = 1", "links.x.alpha"),
    ],
)
def test_malformed_links(tmp_path: Path, link: str, key: str) -> None:
    text = link + "\n" + GOOD if link.startswith("links") else GOOD + link
    with pytest.raises(HardwareError) as info:
        load_target(_write(tmp_path, text))
    assert f"`{key}`" in info.value.where


def test_configs_are_found_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "rhino_jax"
    (installed / "configs" / "hardware").mkdir(parents=True)
    monkeypatch.setattr(files, "__file__", str(installed / "hardware" / "files.py"))
    assert configs_dir() == installed / "configs"


def test_configs_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "__file__", str(tmp_path / "p" / "hardware" / "f.py"))
    with pytest.raises(HardwareError, match="not where they should be") as info:
        configs_dir()
    assert str(tmp_path) in info.value.where
