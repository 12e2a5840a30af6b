"""How a process can be struck: a row each."""

import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from paceline.engines.striking import acts, connections, hosts, sizes

Who = Literal["worker", "server", "launcher"]
_MEMBER: tuple[Who, ...] = ("worker", "server")
_ANYBODY: tuple[Who, ...] = (*_MEMBER, "launcher")


@final
@dataclass(frozen=True)
class Kind:
    who: tuple[Who, ...]
    do: Callable[[Path], AbstractContextManager[None]]
    """Given the run's folder; what it leaves when the place has been called."""
    is_outlived: bool = False
    is_silent: bool = False
    """It lives, and is ended for its silence: a worker always, a server where the run is elastic."""
    is_of_host: bool = False
    """All of the run on its host are struck, which is to be another one than the launcher's."""
    asks_launcher: bool = False
    """It asks the launcher for something, whose host is to be its own."""
    lacks: Callable[[], str] = lambda: ""
    """Why it cannot be had here, if it cannot."""

    @property
    def takes_elastic(self) -> bool:
        """Whether only elastic runs know what to do about it."""
        return self.is_silent or self.asks_launcher


KINDS: Mapping[str, Kind] = {
    "kill": Kind(_ANYBODY, acts.signalled(signal.SIGKILL)),
    "segfault": Kind(_MEMBER, acts.signalled(signal.SIGSEGV)),
    "stop": Kind(_MEMBER, acts.signalled(signal.SIGSTOP), is_silent=True),
    "hold": Kind(_MEMBER, acts.hold_interpreter, is_silent=True),
    "memory": Kind(("worker",), acts.no_more_memory),
    "pause": Kind(_MEMBER, acts.pause, is_outlived=True),
    "cut": Kind(_MEMBER, connections.cut_own, is_outlived=True, lacks=connections.lack),
    "grow": Kind(("worker",), sizes.grow, is_outlived=True, asks_launcher=True),
    "shrink": Kind(("worker",), sizes.shrink, is_outlived=True, asks_launcher=True),
    "full": Kind(("launcher",), acts.full_disk, is_outlived=True),
    "more-servers": Kind(("server",), sizes.more_servers, is_outlived=True, asks_launcher=True),
    "part": Kind(_MEMBER, hosts.part, is_of_host=True, lacks=hosts.lack),
    "flicker": Kind(_MEMBER, hosts.flicker, is_outlived=True, is_of_host=True, lacks=hosts.lack),
    "slow": Kind(_MEMBER, hosts.slow, is_outlived=True, is_of_host=True, lacks=hosts.lack_of_tc),
    "node": Kind(_MEMBER, hosts.kill_node, is_of_host=True),
}


def kinds_of(who: Who, *, is_outlived: bool | None = None) -> tuple[str, ...]:
    """Those that strike a worker, server or launcher; only those that it outlives, or does not, if that is said."""
    return tuple(name for name, kind in KINDS.items() if who in kind.who and is_outlived in (None, kind.is_outlived))
