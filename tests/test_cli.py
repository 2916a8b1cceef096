from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.cli import main
from rhino_jax.commands.words import read_spec, with_flags
from tests.plan.samples import sample_plan


TRAIN = """
import jax
import jax.numpy as jnp


def init():
    return {"w1": jnp.zeros((64, 128)), "w2": jnp.zeros((128, 64))}


def loss(params, x, scale=1.0):
    return jnp.sum((jnp.tanh(x @ params["w1"]) @ params["w2"] * scale) ** 2)


def train_step(params, x, *, scale=1.0):
    grads = jax.grad(loss)(params, x, scale)
    return jax.tree.map(lambda p, g: p - g, params, grads)


def fails(params, x):
    return x @ params["nothing"]


number = 3
"""

SHAPES = """
init = "cli_train:init"
args = ["float32[32,64]"]
donate_argnums = [0]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's module and a file of shapes, entered."""
    (tmp_path / "cli_train.py").write_text(TRAIN)
    (tmp_path / "cli_broken.py").write_text("import jax\nx = 1 / 0\n")
    (tmp_path / "cli_syntax.py").write_text("def f(:\n")
    (tmp_path / "shapes.toml").write_text(SHAPES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("cli_train", "cli_broken", "cli_syntax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


PLAN = ["plan", "cli_train:train_step", "--shapes", "shapes.toml", "--no-progress"]


def test_plan_prints_the_table(project, capsys) -> None:
    assert main([*PLAN, "--mesh", "data=4,model=2", "--hardware", "v5e"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan of train_step")
    assert "data=4 × model=2 (8 devices)" in out
    assert "params['w1']" in out and "f32[32,64]" in out


def test_explore_writes_a_page_that_stands_alone(project, tmp_path, capsys) -> None:
    file = tmp_path / "page.html"
    words = ["explore", *PLAN[1:], "--mesh", "data=4,model=2", "--no-open"]
    assert main([*words, "--html", str(file)]) == 0
    text = file.read_text()
    assert "one step, by the clock" in text and "<script>" in text
    assert "http" not in text and "src=" not in text
    assert str(file) in capsys.readouterr().out


def test_plan_leaves_the_mesh_to_rhino(project, capsys) -> None:
    assert main([*PLAN, "--devices", "8", "--level", "fast"]) == 0
    out = capsys.readouterr().out
    assert "(8 devices)" in out
    assert "mesh shapes compared" in out


def test_plan_saves_and_show_reads(project, capsys) -> None:
    place = ["--mesh", "data=8", "--hardware", "v5e"]
    assert main([*PLAN, *place, "--save", "plan.json", "--html", "plan.html"]) == 0
    planned = capsys.readouterr()
    assert "saved to plan.json" in planned.err
    assert (project / "plan.html").read_text().startswith("<!doctype html>")
    assert rhino.load_plan("plan.json").program_name == "train_step"
    assert main(["show", "plan.json"]) == 0
    assert capsys.readouterr().out == planned.out


def test_keyword_arguments_reach_the_function(project, capsys) -> None:
    text = SHAPES + '[kwargs]\nscale = "float32[]"\n'
    (project / "shapes.toml").write_text(text)
    assert main([*PLAN, "--mesh", "data=8", "--hardware", "v5e", "--full"]) == 0
    assert "scale" in capsys.readouterr().out


def test_plan_takes_a_model_of_the_zoo(capsys) -> None:
    args = ["--mesh", "x=8", "--hardware", "v5e", "--level", "fast", "--no-progress"]
    assert main(["plan", "mlp-tiny", *args]) == 0
    assert "x=8" in capsys.readouterr().out


def test_a_budget_that_cannot_hold_is_exit_code_1(project, capsys) -> None:
    place = ["--mesh", "data=8", "--hardware", "v5e", "--budget-gib", "1e-9"]
    assert main([*PLAN, *place]) == 1
    err = capsys.readouterr().err
    assert err.startswith("InfeasiblePlanError:")
    assert "Traceback" not in err


def test_costs_are_corrected_by_the_compiler(project, capsys) -> None:
    place = ["--mesh", "data=8", "--hardware", "cpu", "--level", "fast"]
    assert main([*PLAN, *place, "--refine", "auto"]) == 0
    assert "costs are corrected by" in capsys.readouterr().out


def test_the_fix_names_flags(project, capsys) -> None:
    place = ["--mesh", "data=8", "--hardware", "v5e", "--memory-budget", "1kB"]
    assert main([*PLAN, *place]) == 1
    err = capsys.readouterr().err
    assert "raise --memory-budget to " in err and "memory_budget_bytes" not in err


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("write level='best'.", "write --level best."),
        ("rhino.plan(fn, mesh={'data': 4, 'model': 2})",
         "rhino.plan(fn, --mesh data=4,model=2)"),
        ("or write refine=3.", "or write --refine 3."),
        ("plan.mesh= and 'pins' and my_pins=3", "plan.mesh= and 'pins' and my_pins=3"),
        ("raise memory_budget_bytes to 4096 (4 KiB)",
         "raise --memory-budget to 4096 (4 KiB)"),
    ],
)  # fmt: skip
def test_keywords_are_told_as_flags(said: str, shown: str) -> None:
    assert with_flags(rhino.RhinoError(said)) == shown


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--version"])
    assert error.value.code == 0
    out = capsys.readouterr().out
    assert rhino.__version__ in out and "jax 0." in out and "ortools" in out


@pytest.mark.parametrize("command", ["plan", "verify", "audit"])
def test_help_says_how_shapes_are_written(command: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert 'tokens = "int32[64,1024]"' in out and "exit codes: 0 done" in out


def test_pins_of_words_and_files(project, capsys) -> None:
    (project / "pins.toml").write_text('"params[\'w2\']" = "model, None"\n')
    (project / "pins.json").write_text('{"x": ["data", null]}')
    pins = ["--pins", "params['w1']=P(None, 'model')", "--pins", "pins.toml"]
    place = ["--mesh", "data=4,model=2", "--hardware", "v5e", "--save", "plan.json"]
    assert main([*PLAN, *place, *pins, "--pins", "pins.json"]) == 0
    leaves = {x.path: x.spec for x in rhino.load_plan("plan.json").inputs}
    assert leaves["params['w1']"] == ((), (1,))
    assert leaves["params['w2']"] == ((1,), ())
    assert leaves["x"] == ((0,), ())


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("None,model", P(None, "model")),
        ("(data,model), None", P(("data", "model"), None)),
        ("P('data')", P("data")),
        ("PartitionSpec(None, ('a', 'b'))", P(None, ("a", "b"))),
        ("", P()),
        ("data", P("data")),
    ],
)
def test_specs_in_words(text: str, spec: P) -> None:
    assert read_spec(text, "here") == spec


def test_verify_a_model_and_a_saved_plan(tmp_path: Path, capsys) -> None:
    saved = str(tmp_path / "plan.json")
    place = ["--mesh", "x=8", "--hardware", "cpu", "--level", "fast", "--no-progress"]
    assert main(["plan", "mlp-tiny", *place, "--save", saved]) == 0
    capsys.readouterr()
    assert main(["verify", "mlp-tiny", "--plan", saved]) == 0
    table = capsys.readouterr().out
    assert "compiled" in table
    assert main(["verify", "mlp-tiny", *place]) == 0
    assert main(["verify", "mlp-tiny", "--plan", saved, "--mesh", "x=4"]) == 2
    assert "leave out --mesh" in capsys.readouterr().err
    assert main(["verify", "gpt-tiny", "--plan", saved, "--compile-for", "cpu"]) == 2
    assert "is not for this program" in capsys.readouterr().err


def test_audit(project, capsys) -> None:
    words = ["audit", "cli_train:train_step", "--shapes", "shapes.toml"]
    words += ["--no-progress", "--level", "fast"]
    assert main(words) == 2
    assert "--mesh data=4,model=2" in capsys.readouterr().err
    words += ["--mesh", "data=8", "--html", "audit.html"]
    assert main([*words, "--sharded", "x=data", "--sharded", "params*=data"]) == 0
    out = capsys.readouterr().out
    assert "all-gather" in out and "train_step" in out
    assert (project / "audit.html").is_file()


def test_show_and_diff_of_saved_plans(tmp_path: Path, capsys) -> None:
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    sample_plan().save(a)
    sample_plan(hardware="h100").save(b)
    assert main(["show", a, "--full", "--html", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out == sample_plan().table(full=True) + "\n"
    assert "plan of train_step" in (tmp_path / "a.html").read_text()
    assert main(["diff", a, b]) == 0
    assert "v5e  →  h100" in capsys.readouterr().out
    assert main(["diff", a, a]) == 0
    assert "no difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nowhere.json"], "no such file"),
        (["show", "shapes.toml"], "not JSON"),
        (["diff", "shapes.toml", "shapes.toml"], "not JSON"),
        (["plan", "gpt-7x"], "Did you mean 'gpt-7b'"),
        (["plan", "gpt-7b", "--shapes", "shapes.toml"], "leave out --shapes"),
        (["plan", "cli_train:train_step"], "--shapes shapes.toml"),
        (["plan", "cli_trane:f", "--shapes", "shapes.toml"], "cannot be loaded"),
        (["plan", "cli_broken:f", "--shapes", "shapes.toml"], "cli_broken.py:2"),
        (["plan", "cli_syntax:f", "--shapes", "shapes.toml"], "cli_syntax.py:1"),
        (
            ["plan", "cli_train:train_stepp", "--shapes", "shapes.toml"],
            "Did you mean 'train_step'",
        ),
        (["plan", "cli_train:number", "--shapes", "shapes.toml"], "cannot be called"),
        (
            ["plan", "cli_train:fails", "--shapes", "shapes.toml", "--mesh", "x=2"],
            "KeyError: 'nothing'",
        ),
        (
            ["plan", "cli_train:fails", "--shapes", "shapes.toml", "--mesh", "x=2"],
            "cli_train.py:20",
        ),
        ([*PLAN, "--shapes", "shape.toml"], "Did you mean 'shapes.toml'"),
        ([*PLAN, "--hardware", "v5"], "known:"),
        ([*PLAN, "--devices", "8", "--mesh", "x=8"], "both given"),
        ([*PLAN, "--devices", "4", "--hardware", "v5e:2x4"], "leave out --devices"),
        ([*PLAN, "--mesh", "x=8", "--save", "no/where/plan.json"], "cannot write"),
        ([*PLAN, "--mesh", "x=8", "--pins", "x=a b"], "spec cannot be read"),
        ([*PLAN, "--mesh", "x=8", "--pins", "x=3"], "spec cannot be read"),
        ([*PLAN, "--mesh", "x=8", "--pins", "none.toml"], "neither PATH=SPEC nor"),
        ([*PLAN, "--mesh", "x=8", "--pins", "cli_train.py"], "cannot be read"),
        ([*PLAN, "--mesh", "x=8", "--pins", "params['w3']=x"], "Did you mean"),
        ([*PLAN, "--mesh", "x=8", "--seed", "-1"], "whole number"),
    ],
)
def test_bad_input_is_exit_code_2_without_a_traceback(
    project, capsys, words: list[str], message: str
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "fix: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required"),
        (["paln"], "invalid choice"),
        (["plan", "gpt-tiny", "--mesh", "data"], "write name=size"),
        (["plan", "gpt-tiny", "--mesh", "data=0"], "write name=size"),
        (["plan", "gpt-tiny", "--mesh", "x=2,x=4"], "given twice"),
        (["plan", "gpt-tiny", "--devices", "0"], "not at least 1"),
        (["plan", "gpt-tiny", "--budget-gib", "-1"], "not positive"),
        (["plan", "gpt-tiny", "--memory-budget", "16G"], "write 16GiB"),
        (
            ["plan", "gpt-tiny", "--memory-budget", "1GB", "--budget-gib", "1"],
            "not allowed with",
        ),
        (["plan", "gpt-tiny", "--refine", "0"], "not at least 1"),
        (["plan", "gpt-tiny", "--budget-gib", "much"], "invalid"),
        (["plan", "gpt-tiny", "--level", "good"], "invalid choice"),
    ],
)
def test_wrong_words_are_exit_code_2(capsys, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as error:
        main(words)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_an_init_that_fails_names_its_line(project, capsys) -> None:
    (project / "shapes.toml").write_text('init = "cli_train:loss"\n')
    assert main([*PLAN, "--mesh", "x=2"]) == 2
    assert "fails on shapes" in capsys.readouterr().err


def test_the_module_runs_and_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sample_plan(notes=tuple(f"note {i}" * 9 for i in range(9000))).save(path)
    command = [sys.executable, "-m", "rhino_jax", "show", str(path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "plan of train_step\n"
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert err == ""


@pytest.mark.slow
def test_the_demo_trains_alike_and_plans_the_large_model(capsys) -> None:
    assert main(["demo", "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert "mesh shapes compared" in out
    rows = [line.split() for line in out.splitlines() if line.strip()[:2] in "1 2 3 "]
    losses = [row for row in rows if len(row) == 4]
    assert [row[0] for row in losses] == ["1", "2", "3"]
    assert all(abs(float(row[1]) - float(row[2])) < 1e-4 for row in losses)
    assert float(losses[-1][1]) < float(losses[0][1])
    assert "(256 devices)" in out and "megatron" in out
