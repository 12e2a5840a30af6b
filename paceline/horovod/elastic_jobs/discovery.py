"""Which hosts there are now: what the user's script prints, or what -H says."""

import shlex
import subprocess
from collections.abc import Callable

from paceline.errors import RunFailed, UsageError
from paceline.horovod.hosts import parse_hosts

_WITHIN_S = 60.0
Discover = Callable[[], dict[str, int]]
"""Slots by host. Raises UsageError or RunFailed if it cannot tell."""


def by_script(command: str, *, slots: int = 1) -> Discover:
    """What the script prints: a host a line, with or without `:slots`.

    Args:
        slots: of hosts that do not say.
    """
    words = shlex.split(command)
    if not words:
        raise UsageError("--host-discovery-script is empty; give a program that prints hosts")

    def discover() -> dict[str, int]:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_WITHIN_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunFailed(f"--host-discovery-script {command} cannot be run: {error}") from None
        if done.returncode != 0:
            said = done.stderr.strip()
            raise RunFailed(f"--host-discovery-script {command} ended with status {done.returncode}: {said}")
        lines = [line.strip() for line in done.stdout.splitlines()]
        return dict(parse_hosts([line for line in lines if line], slots=slots))

    return discover


def fixed(slots: dict[str, int]) -> Discover:
    return lambda: dict(slots)
