"""Elastic jobs in forked processes, whose lines to the launcher are pipes of the tests."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, final

import torch

from paceline.horovod.elastic_jobs.driver import Policy
from paceline.horovod.elastic_jobs.known_hosts import Cooldown
from paceline.horovod.elastic_jobs.loop import Loop
from paceline.horovod.line import Line
from paceline.records import EventRecord
from tests.forks import FORKS


@final
class PipedLine(Line):
    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._places: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def say(self, kind: str, value: Any = None) -> None:  # type: ignore[override]
        self._connection.send((kind, value))

    def _ask(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        self.say("ask", dict(mine))
        place = self._places.get()
        if place is None:
            raise SystemExit(0)
        return place

    def _serve(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                self._places.put(None)
                return
            if message.pop("kind") == "enter":
                self._places.put(message)
            else:
                self.heard(**message)


@final
class ForkedFleet:
    """One job. `train` is called in every worker with a function that tells the test something.

    Args:
        slots: by host, at first.
        shares_memory: whether workers of several hosts can, as they do here.
    """

    def __init__(self, train: Callable[..., Any], slots: dict[str, int], *, cooldown: Cooldown | None = None,
                 shares_memory: bool = True, **policy: Any) -> None:  # fmt: skip
        self.slots, self._train, self._shares_memory = slots, train, shares_memory
        settings = {"num_proc": sum(slots.values()), "min_num_proc": 1, **policy}
        self._loop = Loop(
            self, lambda: dict(self.slots), policy=Policy(**settings), cooldown=cooldown, look_every_s=0.05
        )
        self._processes: dict[int, Any] = {}
        self._connections: dict[int, Connection] = {}
        self.said: queue.Queue[Any] = queue.Queue()
        self.noted: list[EventRecord] = []
        self.on_said: Callable[[Any], None] = lambda said: None

    def run(self) -> list[Any]:
        """All that workers have told."""
        try:
            self._loop.run()
        finally:
            for connection in self._connections.values():
                connection.close()
            for process in self._processes.values():
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()
        return [*self.said.queue]

    def start(self, worker: int, host: str) -> None:
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(
            target=_work, args=(self._train, "" if self._shares_memory else host, theirs), daemon=True
        )
        process.start()
        theirs.close()
        self._processes[worker], self._connections[worker] = process, ours
        threading.Thread(target=self._follow, args=(worker, process, ours), daemon=True).start()

    def stop(self, worker: int) -> None:
        self._connections[worker].close()
        self._processes[worker].kill()

    def tell(self, worker: int, message: dict[str, Any]) -> None:
        self._connections[worker].send(message)

    def note(self, event: EventRecord) -> None:
        self.noted.append(event)

    def _follow(self, worker: int, process: Any, connection: Connection) -> None:
        try:
            while True:
                kind, value = connection.recv()
                if kind == "ask":
                    self._loop.asked(worker, value)
                else:
                    self.said.put(value)
                    self.on_said(value)
        except (EOFError, OSError):
            process.join()
            self._loop.ended(worker, process.exitcode or 0)


def _work(train: Callable[..., Any], host: str, connection: Connection) -> None:
    from paceline.comm import connecting
    from paceline.horovod import line as lines
    from paceline.horovod import runtime
    from paceline.horovod.elastic_jobs import joining

    if host:
        connecting.host_identity = joining.host_identity = lambda: host  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    line = PipedLine(connection)
    lines.connect(line)
    train(lambda value: line.say("said", value))
    runtime.end()
    connection.close()
    os._exit(0)
