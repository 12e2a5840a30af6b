"""What Horovod's environment variables say, in units of the package."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

_MEBIBYTE = 2**20


@final
@dataclass(frozen=True)
class Settings:
    fusion_bytes: int = 64 * _MEBIBYTE
    """The most that small all-reduces are put together to."""
    num_remembered: int = 8192
    """Operations that are called by a number once ranks have agreed on them."""
    cycle_s: float | None = None
    """How long an operation may lie before ranks are told of it, if nobody waits for it; none: what suits the ranks."""
    stall_warning_s: float = 60.0
    """A warning names who is missing after so long; 0: never."""
    stall_shutdown_s: float = 0.0
    """All operations fail, and the error names who is missing, once one has waited for so long; 0: never."""
    timeline: str | None = None
    marks_cycles: bool = False

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Raises ValueError, which names the variable, for what is no number."""

        def given(name: str) -> float | None:
            text = environment.get(name, "")
            try:
                return float(text) if text else None
            except ValueError:
                raise ValueError(f"{name}={text!r} is not a number") from None

        def number(name: str, default: float) -> float:
            found = given(name)
            return default if found is None else found

        is_silent = environment.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
        file, cycle_ms = environment.get("HOROVOD_TIMELINE") or None, given("HOROVOD_CYCLE_TIME")
        return cls(
            fusion_bytes=int(number("HOROVOD_FUSION_THRESHOLD", cls.fusion_bytes)),
            num_remembered=int(number("HOROVOD_CACHE_CAPACITY", cls.num_remembered)),
            cycle_s=None if cycle_ms is None else cycle_ms / 1e3,
            stall_warning_s=0.0 if is_silent else number("HOROVOD_STALL_CHECK_TIME_SECONDS", cls.stall_warning_s),
            stall_shutdown_s=0.0 if is_silent else number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", cls.stall_shutdown_s),
            timeline=None if file == "DYNAMIC" else file,
            marks_cycles=environment.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"),
        )
