"""The file of settings that Horovod's launcher takes, as options of its command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import UsageError, suggest

_OPTIONS = {
    "params": {
        "fusion_threshold_mb": "fusion_threshold_mb",
        "cycle_time_ms": "cycle_time_ms",
        "cache_capacity": "cache_capacity",
        "hierarchical_allreduce": "hierarchical_allreduce",
    },
    "autotune": {"enabled": "autotune"},
    "timeline": {"filename": "timeline_filename", "mark_cycles": "timeline_mark_cycles"},
    "stall_check": {
        "enabled": "no_stall_check",
        "warning_time_seconds": "stall_check_warning_time_seconds",
        "shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    },
    "library_options": {"gloo_timeout_seconds": "start_timeout"},
}
"""By section and name, the command line's."""
_FLAGS = {"hierarchical_allreduce", "autotune", "timeline_mark_cycles", "no_stall_check"}
_PATHS = {"timeline_filename"}


def read(path: Path) -> dict[str, Any]:
    """Values by the names of the command line's options.

    Raises:
        UsageError: the file cannot be read, or says something that has no effect here.
    """
    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"cannot read the config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"the config file {path} is not YAML: {error}") from None
    if not isinstance(said, dict):
        raise UsageError(f"the config file {path} has no sections, such as params or timeline")
    found: dict[str, Any] = {}
    for section, values in said.items():
        if section == "controller":
            found[_controller(path, values)] = True
        else:
            found |= _of_section(path, section, values)
    return found


def _controller(path: Path, value: object) -> str:
    if value not in ("gloo", "mpi"):
        raise UsageError(f"{path}: controller is gloo or mpi, not {value!r}")
    return str(value)


def _of_section(path: Path, section: object, values: object) -> dict[str, Any]:
    known = _OPTIONS.get(str(section))
    if known is None:
        raise UsageError(f"{path}: there is no section {section!r}{suggest(str(section), [*_OPTIONS, 'controller'])}")
    if not isinstance(values, Mapping):
        raise UsageError(f"{path}: {section} is to hold names and values, not {values!r}")
    found = {}
    for name, value in values.items():
        if value is None or (value is False and name not in known):  # which asks for nothing
            continue
        if name not in known:
            raise UsageError(f"{path}: {section}.{name} has no effect here{suggest(str(name), [*known])}; leave it out")
        found[known[name]] = _checked(f"{path}: {section}.{name}", known[name], value)
    return found


def _checked(where: str, option: str, value: object) -> Any:
    if option in _FLAGS:
        if not isinstance(value, bool):
            raise UsageError(f"{where} is true or false, not {value!r}")
        return not value if option == "no_stall_check" else value
    if option in _PATHS:
        return Path(str(value))
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UsageError(f"{where} is a number that is not negative, not {value!r}")
    return value
