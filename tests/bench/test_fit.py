"""Fitting a target's efficiencies to compiled programs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.fit import fit_results, to_text, write_fit
from rhino_jax.bench.records import Measure, Result
from rhino_jax.bench.store import read_results
from rhino_jax.cli import main
from rhino_jax.hardware.files import configs_dir, load_target
from rhino_jax.utils.codec import to_json
from rhino_jax.verify.hlo.records import Rates, rates_of
from rhino_jax.verify.hlo.work import InstructionWork
from tests.bench.samples import result


def program(
    name: str,
    rates: Rates,
    target: str = "v5e:4x4",
    communication_s: float = 0.0,
    slack_s: float | None = None,
) -> Result:
    compute_s = rates.matmul_s + rates.memory_s or 1.0
    compiled = Measure(
        step_time_s=compute_s + communication_s,
        compute_s=compute_s,
        communication_s=communication_s,
        peak_bytes=1,
        wire_bytes=1,
    )
    return result(
        "best",
        1.0,
        row=name,
        predicted=Measure(step_time_s=1.0, slack_s=slack_s),
        compiled=compiled,
        rates=rates,
        target=target,
    )


def tpu_rates(scale: float, hidden_s: float = 0.0) -> Rates:
    return Rates(
        matmul_peak_s=0.9 * scale,
        matmul_s=1.0 * scale,
        memory_peak_s=0.5 * scale,
        memory_s=1.0 * scale,
        hidden_s=hidden_s,
    )


def test_efficiencies_are_those_that_the_programs_have() -> None:
    (fit,) = fit_results([program(str(i), tpu_rates(float(i))) for i in (1, 2, 3)])
    assert (fit.hardware, fit.programs) == ("v5e", 3)
    assert fit.matmul_efficiency == pytest.approx(0.9)
    assert fit.memory_efficiency == pytest.approx(0.5)
    assert fit.compute_error == pytest.approx(0.0)
    assert fit.hidable_share is None


def test_the_error_is_the_median_over_programs() -> None:
    slow = Rates(matmul_peak_s=0.9, matmul_s=3.0, memory_peak_s=0.25, memory_s=0.5)
    every = [program("slow", slow), *(program(n, tpu_rates(1.0)) for n in "ab")]
    (fit,) = fit_results(every)
    assert fit.matmul_efficiency == pytest.approx(2.7 / 5)
    # Of the two that are alike 1/3, of the slow one 0.38.
    assert fit.compute_error == pytest.approx(1 / 3)


def test_overlap_counts_where_much_could_hide() -> None:
    half = [
        program(str(i), tpu_rates(1.0, hidden_s=1.0), communication_s=1.0, slack_s=2.0)
        for i in range(3)
    ]
    little = program("little", tpu_rates(1.0), communication_s=1.0, slack_s=0.1)
    (fit,) = fit_results([*half, little])
    assert fit.hidable_share == pytest.approx(0.5)
    assert (fit.hidable_programs, fit.hidable_spread) == (3, 0.0)


def test_compilers_that_hide_nothing_are_fitted_so() -> None:
    none = [
        program(str(i), tpu_rates(1.0), communication_s=2.0, slack_s=2.0)
        for i in range(3)
    ]
    (fit,) = fit_results(none)
    assert fit.hidable_share == 0.0


def test_the_same_program_counts_once_and_few_say_nothing() -> None:
    one = program("a", tpu_rates(1.0))
    assert fit_results([one, one, one]) == ()
    assert (
        fit_results([program(str(i), tpu_rates(1.0), "cpu:8") for i in range(4)]) == ()
    )


def test_what_a_compiler_estimates_is_added_up_by_what_bounds_it() -> None:
    target = load_target("v5e").replace(launch_s=0.25)
    assert target.device.clock_hz is not None
    work = {
        "name": "x", "opcode": "fusion", "count": 2, "dtype": "bfloat16",
        "cycles": round(target.device.clock_hz), "op": "", "source": "",
    }  # fmt: skip
    items = [
        InstructionWork(flops=197 * 10**11, bytes=0, **work),  # type: ignore[arg-type]
        InstructionWork(flops=0, bytes=8_190_000_000, **work),  # type: ignore[arg-type]
        InstructionWork(flops=1, bytes=1, **(work | {"cycles": None})),  # type: ignore[arg-type]
    ]
    rates = rates_of(items, target, collectives_s=3.0, exposed_s=1.0)
    assert rates.matmul_peak_s == pytest.approx(0.2)
    # Two runs of a second, of which the kernel's start is no arithmetic.
    assert rates.matmul_s == rates.memory_s == pytest.approx(1.5)
    assert rates.memory_peak_s == pytest.approx(0.02)
    assert rates.hidden_s == pytest.approx(2.0)


def test_a_fit_is_written_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "v5e.toml"
    shutil.copy(configs_dir() / "hardware" / "v5e.toml", file)
    before = load_target(file)
    fits = fit_results([program(str(i), tpu_rates(1.0)) for i in range(3)])
    assert "v5e: 3 programs" in to_text(fits)
    assert write_fit(fits[0], tmp_path) == file
    after = load_target(file)
    assert after.device.matmul_efficiency == 0.9
    # Some of the programs' bytes are on the chip.
    assert after.device.memory_efficiency == before.device.memory_efficiency
    assert after.device.hidable_share == before.device.hidable_share
    assert "# fitted: 3 programs, error 0%" in file.read_text()


def test_a_file_without_the_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v5e.toml").write_text("name = 'v5e'\n")
    fits = fit_results([program(str(i), tpu_rates(1.0)) for i in range(3)])
    with pytest.raises(BenchError, match="matmul_efficiency"):
        write_fit(fits[0], tmp_path)


def test_efficiency_of_memory_is_fitted_without_on_chip_memory(tmp_path: Path) -> None:
    file = tmp_path / "v5e.toml"
    shipped = (configs_dir() / "hardware" / "v5e.toml").read_text()
    file.write_text(re.sub(r"(?m)^on_chip_.*\n", "", shipped))
    write_fit(
        fit_results([program(str(i), tpu_rates(1.0)) for i in range(3)])[0], tmp_path
    )
    assert load_target(file).device.memory_efficiency == 0.5


def test_more_than_the_peak_is_not_written(tmp_path: Path) -> None:
    """No hardware file with such a line can be read again."""
    file = tmp_path / "v5e.toml"
    shipped = (configs_dir() / "hardware" / "v5e.toml").read_text()
    file.write_text(re.sub(r"(?m)^on_chip_.*\n", "", shipped))
    before = file.read_text()
    on_chip = Rates(
        matmul_peak_s=0.9, matmul_s=1.0, memory_peak_s=0.52, memory_s=0.5, hidden_s=0.0
    )
    (fit,) = fit_results([program(str(i), on_chip) for i in range(3)])
    with pytest.raises(BenchError, match="memory_efficiency is above 1") as told:
        write_fit(fit, tmp_path)
    assert "1.04 over 3 programs" in str(told.value)
    assert file.read_text() == before


def test_the_command_reads_what_bench_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "full.json"
    results = [to_json(program(str(i), tpu_rates(1.0))) for i in range(3)]
    file.write_text(json.dumps({"results": results}))
    assert read_results(str(file), "`fit`")[0].rates == tpu_rates(1.0)
    assert main(["fit", str(file)]) == 0
    assert "matmul_efficiency 0.900" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "no json", "{}", '{"results": [{"a": 1}]}'])
def test_a_file_that_holds_no_results_is_refused(
    tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "full.json"
    if text is not None:
        file.write_text(text)
    assert main(["fit", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
