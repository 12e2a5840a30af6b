"""A worker's half of a push that counts on all servers or on none; `whole_pushes.py` has theirs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from paceline.server.asked_server import AskedServer


@final
class Committing:
    """Which servers are to have a push before it counts, which lack it, and which know that it counts.

    Args:
        servers: whose number and order stay as they are.
    """

    def __init__(self, servers: Sequence[AskedServer]) -> None:
        self._servers = servers
        self.is_needed = self._by_all = False
        self._lacking: set[int] = set()
        self._asked_again: set[int] = set()
        self._told: set[int] = set()

    def attached(self, said: Sequence[Mapping[str, Any]]) -> None:
        """What each server says to a worker that attaches."""
        is_divided = len(self._servers) > 1 and not all(server.is_beside for server in self._servers)
        self.is_needed = is_divided and all(each["outlives_workers"] for each in said)
        self._by_all = self.is_needed and any(each["is_copied_apart"] for each in said)

    def holds(self, server: AskedServer) -> bool:
        """Whether it is to have a push before that counts; one beside this worker may find it in memory."""
        return self.is_needed and (self._by_all or not server.is_beside)

    def begin(self) -> None:
        """The worker pushes."""
        self._lacking = {index for index, server in enumerate(self._servers) if self.holds(server)}
        self._asked_again.clear()
        self._told.clear()

    def moved(self, index: int) -> None:
        """Another server has this one's place, and is to be given the push again. A line to it takes one request at a
        time: that the push counts it is told when it has said that it has it."""
        self._told.discard(index)
        if self.holds(self._servers[index]):
            self._asked_again.add(index)

    def held(self, index: int) -> Iterator[int]:
        """A server has all of the push. When all have, gives those that are to be told that it counts: each once, and
        whoever takes another's place then, when that says that it has it."""
        self._lacking.discard(index)
        self._asked_again.discard(index)
        for each, server in enumerate(() if self._lacking else self._servers):
            if each not in self._told and each not in self._asked_again and not server.is_new:
                self._told.add(each)
                yield each
