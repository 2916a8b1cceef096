"""Plans as files: JSON with a schema version, versions, fingerprint and checksum.

The checksum is of the content, not of its formatting: a file may be reindented, but not
edited. `rhino_jax.plan.files.schema` defines the content of a file,
`rhino_jax.plan.fits` checks that a plan belongs to a program and mesh.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rhino_jax.errors import PlanFileError, nearest
from rhino_jax.plan.files.schema import (
    FORMAT,
    KEYS,
    SCHEMA_VERSION,
    plan_from_dict,
    plan_to_dict,
)
from rhino_jax.plan.fits import check_fits as check_fits
from rhino_jax.plan.plan import PlanData
from rhino_jax.utils.atomic_write import write_file
from rhino_jax.utils.keywords import brief


def save_plan(plan: PlanData, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON.

    The file is written atomically: see `rhino_jax.utils.atomic_write`.

    Raises:
      WriteError: the file cannot be written.
      PlanFileError: `path` is no path.
    """
    check_path("`plan.save`", path)
    write_file("`plan.save`", path, plan_to_json(plan))


def load_plan(path: str | os.PathLike[str]) -> PlanData:
    """Read a plan that `save_plan` wrote.

    The plan has no mesh: `plan.with_mesh(mesh)` sets one.

    Raises:
      PlanFileError: the file is missing, truncated, no plan, edited, or of another
        schema version; the message tells which.
    """
    check_path("`load_plan`", path)
    what = f"`load_plan({os.fspath(path)!r})`"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _missing(what, Path(path)) from None
    except UnicodeDecodeError as error:
        raise PlanFileError(
            f"{what}: not a plan file: it is not text.",
            where=f"byte {error.start}",
            fix="give the path that was passed to plan.save(path).",
        ) from None
    except OSError as error:
        raise PlanFileError(
            f"{what}: cannot be read: {error.strerror}.",
            where=os.fspath(path),
            fix="give the path of a file written by plan.save(path).",
        ) from None
    return plan_from_json(text, what=what)


def check_path(what: str, path: Any) -> None:
    """Refuse an object that is not a path.

    Raises:
      PlanFileError: it is neither a string nor a path.
    """
    is_path = isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str)
    if not is_path or not os.fspath(path):
        raise PlanFileError(
            f"{what}: this is no path of a file.",
            where="path",
            numbers=f"got {brief(path)} ({type(path).__name__})",
            fix=f"write {what.strip('`')}('plan.json').",
        )


def plan_to_json(plan: PlanData) -> str:
    """Return the text of a plan file."""
    body = plan_to_dict(plan)
    body["checksum"] = checksum(body)
    lines = [
        f"{json.dumps(key)}: {json.dumps(body[key], ensure_ascii=False)}"
        for key in KEYS
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plan_from_json(text: str, *, what: str = "`load_plan`") -> PlanData:
    """Parse the text of a plan file.

    Raises:
      PlanFileError: as `load_plan`.
    """
    data = _parse(text, what)
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        made_with = data.get("versions")
        raise PlanFileError(
            f"{what}: the plan was saved with another schema version.",
            where=f"key 'schema_version'; the file was made with {made_with}",
            numbers=f"got {version!r}, this rhino_jax reads {SCHEMA_VERSION}",
            fix="plan again and save that plan, or use the version that made it.",
        )
    missing = [key for key in KEYS if key not in data]
    extra = sorted(set(data) - set(KEYS))
    if missing or extra:
        raise PlanFileError(
            f"{what}: the plan has missing or unknown keys.",
            where="top level",
            numbers=f"missing: {', '.join(missing) or 'none'};"
            f" unknown: {', '.join(extra) or 'none'}",
            fix="save the plan again with plan.save(path).",
        )
    if data["checksum"] != checksum(data):
        raise PlanFileError(
            f"{what}: the plan was edited after it was saved.",
            where="key 'checksum'",
            numbers=f"the file says {str(data['checksum'])[:12]}…,"
            f" its content gives {checksum(data)[:12]}…",
            fix="plan again with pins={path: PartitionSpec} and save that plan.",
        )
    try:
        return plan_from_dict(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise PlanFileError(
            f"{what}: the plan's content does not fit its schema.",
            where=f"{type(error).__name__}: {error}",
            numbers=f"schema version {data['schema_version']}",
            fix="plan again and save that plan.",
        ) from error


def checksum(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a plan file's content, its checksum left out."""
    rest = {key: value for key, value in data.items() if key != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _parse(text: str, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].rstrip()
        # The text ends, or ends in half a word, as `fals`, or half a string.
        is_cut = not rest or rest.isalpha() or "Unterminated" in error.msg
        raise PlanFileError(
            f"{what}: "
            + (
                "the file is empty."
                if not text.strip()
                else "the file is truncated: it ends in the middle of the plan."
                if is_cut and text.lstrip().startswith("{")
                else f"not a plan file: it is not JSON ({error.msg})."
            ),
            where=f"line {error.lineno}, column {error.colno}",
            numbers=f"{len(text.encode()):,} bytes",
            fix="save the plan again with plan.save(path).",
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanFileError(
            f"{what}: JSON, but not a plan of rhino_jax.",
            where="key 'format'",
            numbers=f"expected {FORMAT!r}",
            fix="give the path that was passed to plan.save(path).",
        )
    return data


def _missing(what: str, path: Path) -> PlanFileError:
    folder = path.parent
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return PlanFileError(
        f"{what}: no such file.{nearest(path.name, names)}",
        where=str(folder.resolve()),
        fix="give the path that was passed to plan.save(path).",
    )
