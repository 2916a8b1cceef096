"""`python -m rhino_jax solve`: what it prints and writes, and what it refuses."""

import copy
import gzip
import json

import pytest

from rhino_jax.cli import main
from rhino_jax.contest.command import Checked, ContestSolution, check, summary
from rhino_jax.contest.instance import InstanceError, parse_instance, read_instance
from rhino_jax.solver.limited import Limited
from tests.contest.instances import best_by_trying, random_values, write


VALUES = random_values(1, 6, 3, 8, 0.5, 0.0)


@pytest.mark.parametrize("is_gzipped", [False, True])
def test_choices_are_printed_and_written(tmp_path, capsys, is_gzipped, short_phases):
    file = tmp_path / "instance.json.gz"
    data = json.dumps(VALUES).encode()
    file.write_bytes(gzip.compress(data) if is_gzipped else data)
    output = tmp_path / "choices.json"
    words = ["solve", str(file), "--time-limit-s", "4", "--output", str(output)]
    assert main(words) == 0
    instance = read_instance(file)
    found = check(instance, json.loads(output.read_text()))
    assert found.fits and found.objective == best_by_trying(instance)
    printed = capsys.readouterr().out
    assert f"objective {found.objective}" in printed
    assert "(optimal)" in printed


def spoiled(change):
    values = copy.deepcopy(VALUES)
    change(values["problem"])
    return values


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], "no table `problem`"),
        ({"problem": {}}, "no table `nodes`"),
        (spoiled(lambda p: p["nodes"].pop("usages")), "no list `usages`"),
        (spoiled(lambda p: p["nodes"]["costs"].pop()), "different lengths"),
        (
            spoiled(lambda p: p["nodes"]["costs"][0].append(1)),
            "as many usages as costs",
        ),
        (spoiled(lambda p: p["nodes"]["costs"].__setitem__(0, [1.5])), "whole numbers"),
        (spoiled(lambda p: p["nodes"]["intervals"].__setitem__(0, [3, 1])), "interval"),
        (spoiled(lambda p: p["nodes"]["usages"][0].__setitem__(0, -1)), "below 0"),
        (
            spoiled(lambda p: p["edges"]["nodes"].__setitem__(0, [0, 99])),
            "two of the 6",
        ),
        (spoiled(lambda p: p["edges"]["nodes"].__setitem__(0, [0, 1, 2])), "join two"),
        (spoiled(lambda p: p["edges"]["costs"][0].append(7)), "per pair"),
        (spoiled(lambda p: p["edges"]["costs"].pop()), "different lengths"),
        (spoiled(lambda p: p.pop("usage_limit")), "usage_limit"),
        (spoiled(lambda p: p.update(usage_limit=True)), "usage_limit"),
    ],
)
def test_malformed_files_are_refused(values, says, tmp_path, capsys):
    file = write(tmp_path, values)
    assert main(["solve", file]) == 2
    said = capsys.readouterr().err
    assert says in said and file in said and "fix:" in said


def test_what_is_no_json_is_refused(tmp_path, capsys):
    for data in (b"{", b"\x1f\x8bnot gzip", b"\xff\xfe"):
        (tmp_path / "x.json").write_bytes(data)
        assert main(["solve", str(tmp_path / "x.json")]) == 2
        assert "cannot be read" in capsys.readouterr().err
    assert main(["solve", str(tmp_path / "missing.json")]) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.update(usage_limit=0), "no choice stays within the memory limit"),
        (
            lambda p: p["nodes"]["costs"].__setitem__(0, [10**18] * 2),
            "no choice avoids all that is forbidden",
        ),
    ],
)
def test_what_nothing_satisfies_is_exit_code_1(change, says, tmp_path, capsys):
    values = spoiled(change)
    assert best_by_trying(parse_instance(values)) is None
    output = tmp_path / "choices.json"
    words = ["solve", write(tmp_path, values), "--output", str(output)]
    assert main(words) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("UnsatisfiedError:") and says in captured.err
    assert not captured.out and not output.exists()


def test_too_little_time_is_exit_code_1(tmp_path, capsys, monkeypatch):
    """Where nothing that satisfies the instance is met before the time is over."""

    monkeypatch.setattr(Limited, "offer", lambda self, labels: False)
    assert main(["solve", write(tmp_path, VALUES), "--time-limit-s", "1"]) == 1
    assert "found in time" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["solve", "--help"]])
def test_help_states_the_exit_codes(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert "exit codes: 0 done; 1 no plan is feasible" in capsys.readouterr().out


def test_what_cannot_be_written_is_said(tmp_path, capsys):
    file = write(tmp_path, VALUES)
    words = ["solve", file, "--time-limit-s", "3", "--output"]
    assert main([*words, str(tmp_path / "no" / "x.json")]) == 2
    captured = capsys.readouterr()
    assert "cannot be written" in captured.err and "objective" in captured.out


def test_a_gap_is_of_the_objective():
    """As plans state theirs: what the bound leaves open, over the objective."""
    instance = parse_instance(VALUES)
    found = Checked(objective=200, peak=3, peak_time=4, forbidden=0, fits=True)
    answer = ContestSolution(
        [0] * 6, found, bound=50, is_optimal=False, num_nodes=(6, 5)
    )
    assert "bound     50 (gap 75.00%)" in summary(instance, answer, 1.0)


def test_the_checker_counts_on_its_own():
    instance = parse_instance({
        "problem": {
            "nodes": {
                "intervals": [[0, 3], [2, 5], [4, 4]],
                "costs": [[1, 2], [10, 20], [0]],
                "usages": [[5, 6], [7, 8], [100]],
            },
            "edges": {
                "nodes": [[0, 1], [1, 0], [0, 0]],
                "costs": [[1, 2, 3, 4], [10, 20, 30, 10**18], [7, 0, 0, 9]],
            },
            "usage_limit": 13,
        }
    })  # fmt: skip
    found = check(instance, [0, 1, 0])
    assert found.objective == 1 + 20 + 2 + 30 + 7
    assert (found.peak, found.peak_time, found.fits) == (13, 2, True)
    assert not check(instance, [1, 1, 0]).fits
    assert check(instance, [1, 1, 0]).forbidden == 1
    for choices in ([0, 0], [0, 2, 0], [0, -1, 0]):
        with pytest.raises(InstanceError):
            check(instance, choices)


def test_a_share_of_the_limit_is_what_must_do(tmp_path, capsys, short_phases):
    file = write(tmp_path, VALUES)
    limit = parse_instance(VALUES).limit
    assert main(["solve", file, "--limit-share", "0.9", "--time-limit-s", "5"]) == 0
    said = capsys.readouterr().out
    assert f" of {int(0.9 * limit)}, at time" in said
    words = ["solve", file, "--limit-share", "1,0.9,0.01", "--time-limit-s", "5"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["share", "limit", "objective", "bound", "gap", "best"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "0.9", "0.01"]
    assert "no choice" in lines[-1]
