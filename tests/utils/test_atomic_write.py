"""Files that users name are written whole or not at all."""

from __future__ import annotations

import errno
import gzip
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rhino_jax as rhino
from rhino_jax.errors import RhinoError, WriteError
from rhino_jax.pipeline import simulation
from rhino_jax.utils.atomic_write import check_folder, write_file
from tests.plan.samples import sample_plan


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is written finds room."""
    whole = Path.write_bytes

    def write_bytes(self: Path, data: bytes) -> int:
        whole(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


WRITERS = {
    "plan": lambda path: sample_plan().save(path),
    "trace": lambda path: simulation.write([], path),
    "packed": lambda path: simulation.write([{"ph": "M"}], Path(f"{path}.gz")),
    "page": lambda path: write_file("`--html`", path, "<p>é</p>"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_told_and_leaves_nothing(
    writer: str, tmp_path: Path, full_disk: None
) -> None:
    with pytest.raises(WriteError, match="cannot write") as refused:
        WRITERS[writer](tmp_path / "file")
    error = refused.value
    assert isinstance(error, RhinoError) and isinstance(error, OSError)
    assert error.errno == errno.ENOSPC and "No space left" in error.what
    assert error.where == str(tmp_path) and "bytes" in error.numbers
    assert "make room" in error.fix
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_stays_where_there_is_no_room(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    request.getfixturevalue("full_disk")
    with pytest.raises(WriteError):
        sample_plan(hardware="h100").save(path)
    assert rhino.load_plan(path) == sample_plan()
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_replaced_and_what_links_to_them_stays(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file)
    write_file("`x`", link, "é")
    assert link.is_symlink() and file.read_bytes() == "é".encode()
    assert file.stat().st_mode & 0o777 == 0o640
    simulation.write([], tmp_path / "a.json.gz")
    assert b"traceEvents" in gzip.decompress((tmp_path / "a.json.gz").read_bytes())


def test_threads_write_one_file_each_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    texts = [letter * 200_000 for letter in "abcd"]
    with ThreadPoolExecutor(len(texts)) as pool:
        for _ in range(20):
            list(pool.map(lambda text: write_file("`x`", file, text), texts))
            assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]


def test_a_device_is_written_to() -> None:
    before = Path("/dev/null").stat()
    write_file("`x`", "/dev/null", "x")
    after = Path("/dev/null").stat()
    assert (after.st_mode, after.st_rdev) == (before.st_mode, before.st_rdev)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for refused in (
        lambda path: write_file("`x`", path, ""),
        lambda path: check_folder("`x`", path),
    ):
        with pytest.raises(WriteError, match="No such file") as told:
            refused(tmp_path / "no" / "file")
        assert "folder that exists" in told.value.fix
    check_folder("`x`", tmp_path / "file")
