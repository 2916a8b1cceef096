"""Write the user's files atomically: whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from rhino_jax.errors import WriteError


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk, and of an exhausted quota."""


def write_file(what: str, path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file atomically: it appears whole, or the previous one stays as it was.

    It is written to a temporary file next to its path and then renamed. Existing paths
    that are no regular files, as `/dev/stdout` or a pipe, are written to and not
    replaced; a symbolic link is followed.

    Args:
      what: name of the calling API, for messages.
      path: path of the file; its folder exists.
      content: bytes, or text to be written as UTF-8.
    Raises:
      WriteError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(path)
    try:
        if _is_in_place(target):
            target.write_bytes(data)
        else:
            replace_file(target.resolve() if target.is_symlink() else target, data)
    except OSError as error:
        raise _refused(what, target, f"{len(data):,} bytes", error) from None


def check_folder(what: str, path: str | os.PathLike[str]) -> None:
    """Refuse a path whose folder does not exist, before work that takes long.

    Raises:
      WriteError: the folder does not exist.
    """
    try:
        Path(path).parent.resolve(strict=True)
    except OSError as error:
        raise _refused(what, Path(path), "", error) from None


def _is_in_place(target: Path) -> bool:
    """Whether the path must be written in place, as a pipe or a device."""
    is_kept = any(target.absolute().is_relative_to(p) for p in ("/dev", "/proc"))
    return is_kept or (target.exists() and not target.is_file())


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file under another name and rename it: processes and threads that read or
    write the path see the old file or a whole new one.

    Args:
      path: a regular file, or one that does not exist.
      data: its content.
      mode: permissions of a new file, before the umask; those of an old one stay.
    Raises:
      OSError: it cannot be written; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.touch(mode, exist_ok=False)
        temporary.write_bytes(data)
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _refused(what: str, target: Path, numbers: str, error: OSError) -> WriteError:
    fix = "give a path in a folder that exists and can be written."
    if error.errno in NO_ROOM:
        fix = "make room there, or give a path on another disk."
    found = WriteError(
        f"{what} cannot write {target.name!r}: {error.strerror or error}.",
        where=str(target.resolve().parent),
        numbers=numbers if error.errno in NO_ROOM else "",
        fix=fix,
    )
    found.errno, found.strerror = error.errno, error.strerror
    return found
