"""Strikes the host of a process, where a run's hosts are network namespaces of one machine."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil

from paceline.errors import UsageError

PARTED_S, FLICKER_S, SLOW_S = 20.0, 1.0, 10.0
"""Longer than any deadline of a chaos run; a moment; and how long its link carries 10 Mbit/s."""
ENDED_S = 30.0
"""Within that Ray ends the processes of a node that has died."""
GONE_S = 45.0
"""Within that it has noticed the death, and takes another one of the same host."""
_SLOW = "root tbf rate 10mbit burst 32kbit latency 400ms"


def network() -> int:
    """The same for exactly those processes that have the same links."""
    return Path("/proc/self/ns/net").stat().st_ino


def lack() -> str:
    """What keeps this process from switching links."""
    return "" if os.geteuid() == 0 and shutil.which("ip") else "switching links takes root and iproute2's ip"


def lack_of_tc() -> str:
    return lack() or ("" if shutil.which("tc") else "slow links take iproute2's tc")


def part(folder: Path) -> AbstractContextManager[None]:
    return _for_a_while("ip link set {0} down", "ip link set {0} up", PARTED_S)


def flicker(folder: Path) -> AbstractContextManager[None]:
    return _for_a_while("ip link set {0} down", "ip link set {0} up", FLICKER_S)


def slow(folder: Path) -> AbstractContextManager[None]:
    return _for_a_while(f"tc qdisc replace dev {{0}} {_SLOW}", f"tc qdisc del dev {{0}} {_SLOW}", SLOW_S)


def kill_node(folder: Path) -> AbstractContextManager[None]:
    """The host's part of Ray, which has started this process; Ray's own part of this process then ends it. Another one
    comes later."""
    from paceline.engines.ray.nodes import starting_again

    number = os.environ.get("RAY_RAYLET_PID")
    if number is None:
        raise UsageError("no part of Ray has started this process, and none can be struck")
    raylet = psutil.Process(int(number))
    start = shlex.join(starting_again())
    _later(GONE_S, f"for each in 1 2 3 4; do {start} && break; sleep {GONE_S / 4}; done", raylet.environ())
    raylet.send_signal(signal.SIGKILL)
    time.sleep(ENDED_S)
    return nullcontext()


def _for_a_while(begin: str, end: str, seconds: float) -> AbstractContextManager[None]:
    link = _link()
    subprocess.run(begin.format(link).split(), check=True)
    _later(seconds, end.format(link), os.environ)
    return nullcontext()


def _later(seconds: float, command: str, variables: Mapping[str, str]) -> None:
    """In a process that outlives this one, so that later runs find the host as it was: no child, which Ray would end
    with this one."""
    subprocess.run(
        ["sh", "-c", f"(sleep {seconds}; {command}) &"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={name: value for name, value in variables.items() if not name.startswith("PACELINE")},
        check=True,
    )


def _link() -> str:
    """By which this host reaches others. Raises UsageError if there is none."""
    for name, each in psutil.net_if_stats().items():
        if name != "lo" and each.isup:
            return str(name)
    raise UsageError("this host's link is down already, and cannot be struck; strike it once at a time")
