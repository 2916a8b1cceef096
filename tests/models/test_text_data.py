"""The demo's data: the same everywhere for the same seed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rhino_jax.models import text


def test_text_is_bounded_and_repeats():
    one, other = text.stdlib_bytes(50_000), text.stdlib_bytes(20_000)
    assert one.dtype == np.uint8
    assert len(one) == 50_000
    np.testing.assert_array_equal(other, one[:20_000])
    assert b"import" in one.tobytes()


def test_text_leaves_out_installed_packages(tmp_path, monkeypatch):
    files = {
        "b.py": "bb",
        "a.py": "a",
        "pkg/c.py": "ccc",
        "site-packages/x.py": "x",
        "test/t.py": "t",
        "pkg/tests/t.py": "t",
        "d.txt": "d",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert text.stdlib_bytes().tobytes() == b"abbccc"


def test_no_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="no Python sources"):
        text.stdlib_bytes()


def test_batches_are_windows_of_the_text():
    source = np.arange(200, dtype=np.uint8)
    batches = list(itertools.islice(text.batches(source, 4, 16, seed=3), 3))
    for batch in batches:
        tokens, labels = batch["tokens"], batch["labels"]
        assert tokens.shape == labels.shape == (4, 16)
        assert tokens.dtype == labels.dtype == np.int32
        np.testing.assert_array_equal(tokens + 1, labels)
        np.testing.assert_array_equal(np.diff(tokens, axis=1), 1)
    again = next(text.batches(source, 4, 16, seed=3))
    np.testing.assert_array_equal(batches[0]["tokens"], again["tokens"])
    other = next(text.batches(source, 4, 16, seed=4))
    assert (batches[0]["tokens"] != other["tokens"]).any()
    assert (batches[0]["tokens"] != batches[1]["tokens"]).any()


def test_a_text_as_long_as_one_window():
    batch = next(text.batches(np.arange(5, dtype=np.uint8), 2, 4))
    assert batch["labels"].tolist() == [[1, 2, 3, 4]] * 2


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="text of 4 bytes, expected more than 4"):
        text.batches(np.zeros(4, np.uint8), 2, 4)
