"""The mailboxes of a virtual world: handlers take messages on the timeline, when they have arrived."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from torch import Tensor

from paceline.cluster.worker_costs import WorkerCosts
from paceline.comm.base import Timing
from paceline.comm.mailbox import Handler, Mailbox
from paceline.engines.virtual.network.links import Network
from paceline.engines.virtual.network.meeting import Meeting
from paceline.engines.virtual.process import Process, Signal
from paceline.errors import Aborted, PeerLost


@final
class PostOffice:
    """Knows all workers' mailboxes of one number, and what lies between them.

    Args:
        network: for messages.
        meeting: of the same workers.
        host_of: each worker's host, by rank.
        costs: what a message takes its sender, besides what passes the links.
    """

    def __init__(self, network: Network, meeting: Meeting, host_of: Sequence[int], *, costs: WorkerCosts) -> None:
        self._network, self.meeting, self._host_of = network, meeting, host_of
        self.costs = costs
        self._boxes: dict[int, VirtualMailbox] = {}
        self._kept: dict[int, list[tuple[int, Tensor]]] = {}
        """What has come for workers that have no mailbox yet, or have not opened it."""

    def open(self, rank: int, mailbox: "VirtualMailbox") -> None:
        self._boxes[rank] = mailbox
        for sender, message in self._kept.pop(rank, ()):
            mailbox.take(sender, message)

    def send(self, sender: int, receiver: int, message: Tensor) -> None:
        source, destination = self._host_of[sender], self._host_of[receiver]
        self.meeting.note_message(sender)
        self._network.send(source, destination, float(message.nbytes), self._deliver, sender, receiver, message)

    def _deliver(self, sender: int, receiver: int, message: Tensor) -> None:
        if receiver in self._boxes:
            self._boxes[receiver].take(sender, message)
        else:
            self._kept.setdefault(receiver, []).append((sender, message))


@final
class VirtualMailbox(Mailbox):
    """A turn begins once the timeline has come to the worker's time, so that all that came before has been taken."""

    def __init__(self, office: PostOffice, process: Process, *, rank: int) -> None:
        self.timing = Timing()
        self._office, self._process, self._rank = office, process, rank
        self._handler: Handler | None = None
        self._came = Signal()
        self._failure: Exception | None = None
        office.meeting.on_lost.append(self._wake)

    @property
    def has_ended(self) -> bool:
        return self._office.meeting.is_lost

    def open(self, handler: Handler) -> None:
        self._handler = handler
        self._process.post(self._office.open, self._rank, self)

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._process.settle()
        self._require_going()
        yield

    def send(self, message: Tensor, *, destination: int) -> None:
        self.timing.communication_s += self._process.send_off(self._office.costs)
        self.timing.moved_bytes += message.nbytes
        self._process.post(self._office.send, self._rank, destination, message)

    def wait(self, is_over: Callable[[], bool], what: str, *, sender: int) -> None:
        began_s = self._process.catch_up()
        try:
            while not is_over():
                if sender in self._office.meeting.gone:
                    raise PeerLost(f"{what} does not come: that rank is gone")
                self._came = Signal()
                self._process.wait(self._came, lambda: what)
                self._require_going()
        finally:
            self.timing.communication_s += self._process.now_s - began_s

    def take(self, sender: int, message: Tensor) -> None:
        """A message has arrived."""
        if self._handler is None or self._failure is not None:
            return
        timeline = self._process.timeline
        try:
            for receiver, answer in self._handler(sender, message):
                self.timing.moved_bytes += answer.nbytes
                leaves_s = timeline.now_s + self._office.costs.message.time_s
                timeline.at(leaves_s, self._office.send, self._rank, receiver, answer)
        except Exception as error:
            self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._came.fired_s is None:
            self._came.fire(self._process.timeline)

    def abort(self, reason: str) -> None:
        self._failure = self._failure or Aborted(reason)

    def close(self) -> None:
        self._handler = None

    def _require_going(self) -> None:
        if self._failure is not None:
            raise self._failure
