"""Values of a suite's file, checked one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.bench.errors import BenchError
from rhino_jax.errors import check_keys, nearest


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a file values are checked."""

    file: str
    what: str

    def check(
        self,
        is_good: bool,
        key: str,
        value: Any,
        expected: str,
        known: Sequence[str] = (),
    ) -> None:
        if is_good:
            return
        close = nearest(value, known) if isinstance(value, str) else ""
        raise BenchError(
            f"{self.what}: `{key}` is not {expected}.{close}",
            where=f"{self.file}, key `{key}`",
            numbers=f"got {value!r}"
            + (f", known: {', '.join(known)}" if known else ""),
            fix=f"change `{key}`.",
        )

    def check_keys(
        self, table: Mapping[str, Any], known: Sequence[str], required: Sequence[str]
    ) -> None:
        check_keys(BenchError, self.what, table, known, self.file)
        for key in required:
            if key not in table:
                raise BenchError(
                    f"{self.what} has no `{key}`.",
                    where=self.file,
                    numbers=f"required: {', '.join(required)}",
                    fix=f"add the key `{key}`.",
                )
