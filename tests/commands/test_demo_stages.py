"""The demo of a U-Net over two emulated hosts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from rhino_jax.cli import main


@pytest.mark.slow
def test_a_unet_trains_in_two_stages_as_on_one_device():
    done = subprocess.run(
        [sys.executable, "-m", "rhino_jax", "demo", "--stages", "2", "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"1f1b|gpipe|kfkb|zero-bubble|searched", done.stdout)
    losses = done.stdout.partition("one device")[2].partition("difference")[2]
    rows = re.findall(r"^ +(\d) +(\S+) +(\S+) +\S+$", losses, re.M)
    assert [int(row[0]) for row in rows] == [1, 2]
    for _, staged, single in rows:
        assert float(staged) == pytest.approx(float(single), rel=1e-4)


def test_stages_that_do_not_divide_the_devices_are_refused(capsys):
    assert main(["demo", "--stages", "3"]) == 2
    assert "3 equal stages" in capsys.readouterr().err
