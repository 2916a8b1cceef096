"""Four-part errors: what went wrong, where, with which numbers, and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence


class RhinoError(Exception):
    """Base of all errors of this package.

    Args:
      what: one sentence that names the call and what went wrong.
      where: the user's file and line, tree path or file key.
      numbers: actual and expected values, with units.
      fix: the exact change to try.
    """

    def __init__(
        self, what: str, *, where: str = "", numbers: str = "", fix: str = ""
    ) -> None:
        self.what, self.where, self.numbers, self.fix = what, where, numbers, fix
        lines = [what]
        lines += [
            f"  {name}: {text}"
            for name, text in (("where", where), ("numbers", numbers), ("fix", fix))
            if text
        ]
        super().__init__("\n".join(lines))


class MeshError(RhinoError, ValueError):
    """No devices, or a mesh that does not match."""


class PinError(RhinoError, ValueError):
    """A pin that names nothing, an unknown axis, or does not divide."""


class HardwareError(RhinoError, ValueError):
    """An unknown hardware name or a malformed hardware file."""


class InfeasiblePlanError(RhinoError, RuntimeError):
    """No plan satisfies pins and memory budget together.

    Attributes:
      smallest_peak_bytes: smallest peak memory of any plan that was found, bytes per
        device: with this budget there is a plan; None where nothing was planned.
      divided_peak_bytes: that peak, were every value divided evenly over all devices,
        bytes; stages cannot go below it either; None where it is not known.
    """

    def __init__(
        self,
        what: str,
        *,
        smallest_peak_bytes: int | None = None,
        divided_peak_bytes: int | None = None,
        **parts: str,
    ) -> None:
        super().__init__(what, **parts)
        self.smallest_peak_bytes = smallest_peak_bytes
        self.divided_peak_bytes = divided_peak_bytes


class MicrobatchError(RhinoError, ValueError):
    """A batch that cannot be split into micro-batches: an op needs all of it."""


class CompilerError(RhinoError, RuntimeError):
    """A compiler that aborted its process, or could not be called."""


class CoupledBatchError(MicrobatchError):
    """A batch whose rows are coupled too often, or by too much, to be split.

    Attributes:
      places: ops that couple the rows, in the form of `per_microbatch=`.
    """

    def __init__(self, what: str, *, places: Sequence[str] = (), **parts: str) -> None:
        super().__init__(what, **parts)
        self.places = tuple(places)


class OptionError(RhinoError, TypeError):
    """A keyword that is not an option of the function."""


class PlanFileError(RhinoError, ValueError):
    """A plan file that is damaged, or belongs to another program or mesh."""


class ProcessError(RhinoError, RuntimeError):
    """Processes that do not agree on program or plan, or one that is lost.

    Attributes:
      lost: index of the lost process; None where no process is lost.
    """

    lost: int | None = None


class RuleError(RhinoError, ValueError):
    """A registered rule that does not match its op, or is wrong for it."""


class ScheduleError(RhinoError, ValueError):
    """A pipeline schedule that leaves tasks out, or does not match its stages."""


class DeadlockError(ScheduleError):
    """A schedule whose tasks wait for each other in a cycle."""


class ScheduleMemoryError(ScheduleError):
    """A schedule whose peak memory exceeds that of a stage's devices."""


class TokenSliceError(ScheduleError):
    """A sequence that cannot run in slices, since tokens depend on later ones."""


class StageError(RhinoError, ValueError):
    """A program that cannot be split into that many stages, or not as pinned."""


class StageOrderError(StageError):
    """A program in which a stage needs a value that a later one computes."""


class InternalError(RhinoError, RuntimeError):
    """A contradiction inside of this package, whatever the user's program.

    Args:
      what, where, numbers, fix: as for `RhinoError`.
    """

    def __init__(
        self,
        what: str,
        *,
        fix: str = "report this, with the program that shows it.",
        **parts: str,
    ) -> None:
        super().__init__(what, fix=fix, **parts)


class TraceError(RhinoError, RuntimeError):
    """A function that cannot be traced into a program."""


class WriteError(RhinoError, OSError):
    """A file that cannot be written, as on a full disk."""

    def __str__(self) -> str:
        return str(self.args[0])  # an `OSError` shows its number alone


class RhinoWarning(UserWarning):
    """Something the user should know; emitted once per site."""


def check_keys(
    error: type[RhinoError],
    what: str,
    keys: Iterable[str],
    known: Iterable[str],
    where: str,
) -> None:
    """Refuse unknown keys.

    Args:
      error: class of the error to raise.
      what: the file or table, at the start of the message.
      keys: keys that are present, perhaps with their values.
      known: keys that are accepted.
      where: the file or call.
    """
    known = tuple(known)
    for key in keys:
        if key not in known:
            got = f"; got {keys[key]!r}" if isinstance(keys, Mapping) else ""
            raise error(
                f"{what} has an unknown key `{key}`.{nearest(key, known)}",
                where=f"{where}, key `{key}`",
                numbers=f"known: {', '.join(known)}{got}",
                fix=f"remove or rename `{key}`.",
            )


def nearest(name: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """Return ` Did you mean 'x'?` with the known name nearest to `name`, or nothing.

    Case-insensitive.

    Args:
      name: the unknown name.
      known: known names.
      cutoff: smallest similarity, from 0 to 1, as in `difflib.get_close_matches`.
    """
    spelt = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), list(spelt), n=1, cutoff=cutoff)
    return f" Did you mean {spelt[close[0]]!r}?" if close else ""
