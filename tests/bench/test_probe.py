"""Small programs of every family of ops, predicted and compiled."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from rhino_jax._compat.attention import fused_attention_traced
from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.probe.command import ProbeCommand, run_probe
from rhino_jax.bench.probe.functions import ON_GPUS, probed_functions
from rhino_jax.bench.probe.report import factor, report
from rhino_jax.bench.probe.run import Probe, chosen
from rhino_jax.bench.probe.variations import VARIATIONS, variation
from rhino_jax.frontend import rules
from rhino_jax.frontend.regions import inner_equations, sub_jaxprs
from rhino_jax.frontend.registry import lookup
from rhino_jax.hardware.files import load_target
from rhino_jax.verify.places import CompilePlace
from tests.verify.extras import mesh_of_target


V5E = load_target("v5e:2x2")
H100 = load_target("h100:4")


def test_every_family_of_rules_is_probed() -> None:
    families = {p.stem for p in Path(rules.__path__[0]).glob("*.py")}
    # Helpers, ops of which nothing is known, and what rolls become.
    families -= {"__init__", "factors", "opaque", "rotate"}
    probed = set()
    with fused_attention_traced():
        for function in probed_functions():
            call = variation(function, "forward")
            assert call is not None
            jaxpr = jax.make_jaxpr(call.fn)(*call.args)
            names = {e.primitive.name for e in inner_equations(jaxpr, sub_jaxprs)}
            found = filter(None, map(lookup, names))
            probed |= {rule.__module__.rpartition(".")[2] for rule in found}
    assert families <= probed, families - probed


def test_variations_change_one_thing() -> None:
    (matmul,) = [p for p in probed_functions() if p.name == "matmul"]
    calls = {name: variation(matmul, name) for name in VARIATIONS}
    assert all(call is not None for call in calls.values())
    shapes = {n: [x.shape for x in c.args] for n, c in calls.items() if c is not None}
    assert shapes["uneven"] == [(65536, 1000), (1000, 4072)]
    assert shapes["other order"] == [(1024, 65536), (4096, 1024)]
    assert shapes["loop"] == [(4, 65536, 1024), (1024, 4096)]
    gradient = calls["gradient"]
    assert gradient is not None
    made = jax.eval_shape(gradient.fn, *gradient.args)
    assert [x.shape for x in made] == shapes["gradient"]


def test_a_count_takes_every_program_and_many_variations() -> None:
    cells = chosen("", 76, V5E)
    assert len({program.name for program, _ in cells}) >= 70
    assert {variation for _, variation in cells} == set(VARIATIONS)
    assert not {program.name for program, _ in cells} & set(ON_GPUS)


def test_a_pattern_that_fits_nothing_names_what_there_is() -> None:
    with pytest.raises(BenchError, match=r"conv.*variations: forward, gradient"):
        chosen("convolutions/*", None, V5E)


def _probe(name: str, predicted_s: float, compiled_s: float, error: str = "") -> Probe:
    family, program, variation = name.split("/")
    return Probe(
        family=family,
        program=program,
        variation=variation,
        predicted_s=predicted_s,
        compiled_s=compiled_s,
        predicted_peak_bytes=90,
        compiled_peak_bytes=100,
        cause="dot: 1 TFLOP/s",
        error=error,
    )


def test_the_report_begins_with_what_is_predicted_worst() -> None:
    found = [
        _probe("dot/matmul/forward", 1e-3, 1e-3),
        _probe("conv/stem/forward", 1e-3, 2e-3),
        _probe("conv/stem/gradient", 3e-3, 1e-3),
        _probe("sort/sort/forward", 0, 0, "the compiler ended"),
    ]
    assert [round(factor(p), 1) for p in found[:3]] == [1.0, 2.0, 3.0]
    lines = report(found, None, 2).splitlines()
    assert lines[2].startswith(
        "| conv/stem/gradient | dot: 1 TFLOP/s | 3.00 ms | 1.00 ms |"
    )
    assert lines[3].startswith("| conv/stem/forward |")
    assert "3 programs, 1 within 1.6 times" in "\n".join(lines)
    assert lines[-1] == "- sort/sort/forward: the compiler ended"


def test_the_report_names_what_changed_for_the_worse_first() -> None:
    before = [
        _probe("dot/matmul/forward", 1e-3, 1e-3),
        _probe("conv/stem/forward", 1e-3, 2e-3),
        _probe("conv/stem/gradient", 1e-3, 1e-3),
    ]
    found = [
        _probe("dot/matmul/forward", 1e-3, 1e-3),
        _probe("conv/stem/forward", 2e-3, 2e-3),
        _probe("conv/stem/gradient", 3e-3, 1e-3),
    ]
    text = report(found, {p.name: p for p in before}, 2)
    *_, worse, better = text.splitlines()
    assert worse.startswith("- conv/stem/gradient: 1.00 → 2.96")
    assert better.startswith("- conv/stem/forward: 0.50 → 1.00")
    assert "2 of 3 programs changed by more than 10.0 %: 1 are predicted worse" in text


def _run(hardware: str, folder: Path) -> Probe:
    only = "dot/matmul/forward"
    command = ProbeCommand(hardware=hardware, only=only, out=str(folder))
    assert run_probe(command) == 0
    (file,) = folder.glob("probe-*.json")
    (found,) = json.loads(file.read_text())["probes"]
    return Probe(**found)


def test_compiled_programs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _run("cpu:2", tmp_path)
    monkeypatch.setattr(CompilePlace, "compile", None)
    assert _run("cpu:2", tmp_path) == first
    assert first.name == "dot/matmul/forward"
    assert first.compiled_peak_bytes > 0


@pytest.mark.compile_only
@pytest.mark.parametrize("hardware", ["v5e:2x2", "h100:4"])
def test_a_matmul_takes_what_is_predicted(hardware: str, tmp_path: Path) -> None:
    mesh_of_target(hardware)
    assert factor(_run(hardware, tmp_path)) < 1.1
