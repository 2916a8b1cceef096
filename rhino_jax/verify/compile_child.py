"""Compile programs in a child process.

    python -m rhino_jax.verify.compile_child FILE

FILE receives the compiler's standard error, should it abort the process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from rhino_jax._compat import CompiledInput
from rhino_jax.utils.stderr import keep_captured
from rhino_jax.utils.subprocess import answer_tasks
from rhino_jax.verify.compile import compiled_by
from rhino_jax.verify.in_child import CompilerAnswer, CompilerTask


def main() -> None:
    """Compile programs until the parent process has ended."""
    keep_captured(Path(sys.argv[1]))
    answer_tasks(_answer)


def _answer(task: CompilerTask) -> CompilerAnswer:
    by_id = {device.id: device for device in task.origin.devices()}
    devices = [by_id[i] for i in task.device_ids]

    def compile(more: Mapping[str, Any]) -> CompiledInput:
        return CompiledInput(task.module, task.options, devices, more)

    try:
        return CompilerAnswer(*compiled_by(compile, task.platform))
    except jax.errors.JaxRuntimeError as error:
        return CompilerAnswer(None, "", str(error))


if __name__ == "__main__":
    main()
