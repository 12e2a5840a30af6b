"""TensorFlow's names of devices, as numbers of workers on processors or GPUs."""

import re
from collections.abc import Sequence

from paceline.config import DeviceChoice
from paceline.errors import UsageError

_NAME = re.compile(r"(?:/?(?:device:)?)(cpu|gpu):(\d{1,4})", re.IGNORECASE | re.ASCII)


def workers_on(devices: Sequence[str], *, option: str) -> tuple[int, DeviceChoice]:
    """How many workers `devices` are, one each, and where they compute.

    Names are `GPU:0`, `/gpu:0` or `/device:GPU:0`, of one kind, numbered from 0 on: Paceline hands out devices itself.

    Raises:
        UsageError: there is none, one is no such name, or they cannot be had; the message names the option.
    """
    if isinstance(devices, str) or not devices:
        raise UsageError(f"{option} must be a list of devices, such as ['GPU:0', 'GPU:1'], not {devices!r}")
    read = [_read(name, option=option) for name in devices]
    kinds = sorted({kind for kind, _ in read})
    if len(kinds) > 1:
        raise UsageError(f"{option} names CPUs and GPUs; workers of one run compute on one kind")
    if sorted(number for _, number in read) != list(range(len(read))):
        raise UsageError(
            f"{option} must be numbered 0 to {len(read) - 1}, each once, not {', '.join(devices)}: devices are handed "
            "out in order; to choose some, set CUDA_VISIBLE_DEVICES"
        )
    return len(read), "cuda" if kinds == ["gpu"] else "cpu"


def _read(name: str, *, option: str) -> tuple[str, int]:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise UsageError(f"{option}: {str(name)[:60]!r} is no device of Paceline's; those are CPU:N and GPU:N")
    return match[1].lower(), int(match[2])
