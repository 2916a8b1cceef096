"""Errors in four parts: what went wrong, where, with which numbers, and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class RhinoError(Exception):
    """Base of all errors of this package.

    Args:
      what: one sentence that names the call and what went wrong.
      where: the user's file and line, tree path or file key.
      numbers: what was got and what was expected, with units.
      fix: the exact thing to try.
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
      smallest_peak_bytes: per device, the least that any plan was found to hold: with
        this budget there is a plan; None where nothing was planned.
      divided_peak_bytes: that peak, were every value divided evenly over all devices,
        below which stages do not come either; None where it is not known.
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
    """A batch that cannot be cut in time: something needs all of it at once."""


class CompilerError(RhinoError, RuntimeError):
    """A compiler that ended its own process, or could not be asked."""


class CoupledBatchError(MicrobatchError):
    """A batch whose rows meet too often, or in too much, to be cut in time.

    Attributes:
      places: of the ops that couple the rows, as `per_microbatch=` takes them.
    """

    def __init__(self, what: str, *, places: Sequence[str] = (), **parts: str) -> None:
        super().__init__(what, **parts)
        self.places = tuple(places)


class PlanFileError(RhinoError, ValueError):
    """A plan file that is damaged, or belongs to another program or mesh."""


class ProcessError(RhinoError, RuntimeError):
    """Processes that do not agree on program or plan, or one that is lost.

    Attributes:
      lost: index of the process that is lost, if that is what it says.
    """

    lost: int | None = None


class RuleError(RhinoError, ValueError):
    """A registered rule that does not fit its op, or is not true of it."""


class ScheduleError(RhinoError, ValueError):
    """A schedule of a pipeline that leaves tasks out, or does not suit its stages."""


class DeadlockError(ScheduleError):
    """A schedule whose tasks wait for one another."""


class ScheduleMemoryError(ScheduleError):
    """A schedule that holds more at once than a group of devices has."""


class TokenSliceError(ScheduleError):
    """A sequence that cannot run slice by slice, as tokens need later ones."""


class StageError(RhinoError, ValueError):
    """A program that cannot be cut into so many stages, or not where it was pinned."""


class StageOrderError(StageError):
    """What has to be in a stage needs what a later one makes."""


class InternalError(RhinoError, RuntimeError):
    """A contradiction inside of this package, whatever the user's program is.

    Args:
      what, where, numbers, fix: as of `RhinoError`.
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
        return str(self.args[0])  # an `OSError` says its number alone


class RhinoWarning(UserWarning):
    """Something the user should know; emitted once per site."""


def check_keys(
    error: type[RhinoError],
    what: str,
    keys: Iterable[str],
    known: Iterable[str],
    where: str,
) -> None:
    """Refuse keys that are not known.

    Args:
      error: what to raise.
      what: the file or table, at the start of the message.
      keys: those that are there.
      known: those that may be.
      where: the file or call.
    """
    known = tuple(known)
    for key in keys:
        if key not in known:
            raise error(
                f"{what} has an unknown key `{key}`.{nearest(key, known)}",
                where=f"{where}, key `{key}`",
                numbers=f"known: {', '.join(known)}",
                fix=f"remove or rename `{key}`.",
            )


def nearest(name: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """Return the known name most like `name`: ` Did you mean 'x'?`, or nothing.

    Capitals do not count.

    Args:
      cutoff: least similarity, from 0 to 1, as of `difflib.get_close_matches`.
    """
    spelt = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), list(spelt), n=1, cutoff=cutoff)
    return f" Did you mean {spelt[close[0]]!r}?" if close else ""
