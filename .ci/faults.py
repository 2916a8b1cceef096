"""Put faults into the package, one by one, and report which the tests find.

    python .ci/faults.py [--only NAME ...] [--faults-alone] [PYTEST_ARGS ...]

Each fault is one edit of a copy of this checkout, in which pytest then runs until the
first failure; before any, all tests must pass without. Run it with the interpreter of
the environment that has the test extra; by default pytest runs as README's test command
does. Exit status: how many faults were not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """`old`, which stands in `file` of the package once, becomes `new`."""

    file: str
    old: str
    new: str


FAULTS = {
    # A maximum over a sharded dim is added up instead.
    "rule-reducer": Fault(
        "frontend/rules/reduce.py", '"reduce_max": "max"', '"reduce_max": "sum"'
    ),
    # The dim along which a running sum runs may be sharded.
    "rule-cumsum": Fault(
        "frontend/rules/reduce.py",
        'factors.whole(size) if d == ctx.params["axis"]',
        'factors.parallel(size) if d == ctx.params["axis"]',
    ),
    # A ring moves all bytes instead of (n - 1) / n of them.
    "cost-ring": Fault(
        "cost/collectives.py",
        "share = (link.size - 1) / link.size\n    return _Taken(steps",
        "share = 1.0\n    return _Taken(steps",
    ),
    # Buffers of donated arguments are counted as live for one op too long.
    "memory-donated": Fault("analysis/liveness.py", "edge.time - owned", "edge.time"),
    # 1F1B holds one micro-batch more than it must.
    "schedule-1f1b": Fault(
        "pipeline/schedules/one_f_one_b.py",
        "min(len(turns), work.groups - stage - 1)",
        "min(len(turns), work.groups - stage)",
    ),
    # Means over micro-batches are summed instead.
    "rewrite-mean": Fault(
        "passes/microbatch/emit.py",
        '_scaled(x, self.piece.share) if crossing.how == "mean" else x',
        "x",
    ),
    # Axes are added to a dim whose major axes are not yet those that are wanted.
    "reshard-order": Fault(
        "cost/reshard.py",
        "                and tuple(dim) == goal[: len(dim)]\n",
        "",
    ),
    # A pin that does not divide is answered with an axis that does not divide either.
    "message-pin": Fault(
        "plan/resolved_pins.py", "size % count == 0]", "size % count != 0]"
    ),
    # Transposed replica groups are read as if they were not.
    "verify-groups": Fault(
        "verify/hlo/collectives/groups.py",
        "array = array.transpose(_ints(transpose))\n    return array.reshape",
        "pass\n    return array.reshape",
    ),
    # Saved plans forget which arguments are donated.
    "file-donation": Fault(
        "plan/files/schema.py", '"is_donated": leaf.is_donated', '"is_donated": False'
    ),
}
README = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults-alone", action="store_true", help="trust the tests")
    parser.add_argument("--only", action="append", choices=FAULTS)
    parser.add_argument("pytest", nargs="*", help="default: as README's test command")
    options = parser.parse_args()
    if not options.faults_alone:
        if failed := try_fault(None, options.pytest or README):
            parser.exit(1, f"without a fault: {failed}\n")
    missed = 0
    for name in options.only or FAULTS:
        start = time.monotonic()
        found = try_fault(FAULTS[name], options.pytest or README)
        missed += not found
        seconds = time.monotonic() - start
        print(f"{name:16} {seconds:5.0f} s  {found or 'NOT FOUND'}", flush=True)
    print(f"{missed} not found")
    return missed


def put(fault: Fault, file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.old!r} does not stand in {fault.file} once")
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def try_fault(fault: Fault | None, arguments: Sequence[str]) -> str:
    """Return the tests that failed with a fault, or nothing."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(
            ".venv*", ".*_cache", "__pycache__", "artifacts"
        )
        shutil.copytree(root, copy, ignore=ignored)
        if fault is not None:
            put(fault, copy / "rhino_jax" / fault.file)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", *arguments]
        # The copy comes before what is installed.
        env = {**os.environ, "PYTHONPATH": str(copy)}
        run = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, check=False
        )
    lines = run.stdout.splitlines()
    failed = [x for x in lines if x.startswith(("FAILED", "ERROR")) and "::" in x]
    if not failed and run.returncode:  # No test at all ran, as where imports fail.
        raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
    return " | ".join(line.partition(" - ")[0] for line in failed)


if __name__ == "__main__":
    sys.exit(main())
