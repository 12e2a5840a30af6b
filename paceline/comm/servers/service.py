"""A server's loop: what it holds, behind a socket and lines. Tensors of workers on this host stay in shared memory."""

import math
from typing import final

import zmq

from paceline.comm.servers.holding import Holding, identity_of
from paceline.comm.servers.line import Bell, BellAddress
from paceline.comm.wire import Keys, Listener
from paceline.records import NullReporter, Reporter
from paceline.server.spec import ServerSpec

POLL_S = 0.1


@final
class ParameterService:
    """Serves one key range, of each optimizer of a run, to its workers until `stop`.

    Args:
        keys: of the run.
        host: the address to listen on.
        index: which server of the group this is.
        epoch: membership epoch; requests of another one are refused.
        reporter: gets a record for every gradient that the first optimizer applies.
    """

    def __init__(self, keys: Keys, *, host: str, index: int, epoch: int, reporter: Reporter) -> None:
        self._listener = Listener(keys, host=host)
        self.endpoint = self._listener.endpoint
        self._bell = Bell()
        self._index, self._epoch = index, epoch
        self._first = Holding(index=index, number=0, epoch=epoch, reporter=reporter, send=self._listener.send)
        self._holdings = [self._first]
        self._asked: dict[bytes, Holding] = {}  # by the identity of who asks, if that is not the first
        self._is_stopping = False

    @property
    def bell(self) -> BellAddress:
        """What workers on this host ring after a request on their line."""
        return self._bell.address

    @property
    def iteration(self) -> int:
        return self._first.iteration

    def configure(self, spec: ServerSpec) -> None:
        """Build the shards for one optimizer; called once for each in order, before any worker attaches to it. Raises
        UsageError for an unfit aggregator."""
        if spec.number:
            holding = Holding(
                index=self._index,
                number=spec.number,
                epoch=self._epoch,
                reporter=NullReporter(),
                send=self._listener.send,
            )
            holding.configure(spec)
            self._asked |= {identity_of(rank, spec.number): holding for rank in spec.rule.members.ranks}
            self._holdings.append(holding)
        else:
            self._first.configure(spec)

    def serve(self) -> None:
        """Answer requests until `stop` is called. Raises what an update raised; then nothing is served any more."""
        poller = zmq.Poller()
        poller.register(self._listener.socket, zmq.POLLIN)
        poller.register(self._bell.fd, zmq.POLLIN)
        try:
            while not self._is_stopping:
                wakes_in_s = min(POLL_S, *(holding.wakes_in_s for holding in self._holdings))
                for source, _ in poller.poll(math.ceil(max(0.0, wakes_in_s) * 1000)):
                    if source == self._bell.fd:
                        self._handle_lines()
                    else:
                        self._handle_socket()
                for holding in self._holdings:
                    holding.look()
        finally:
            self._close()

    def stop(self) -> None:
        self._is_stopping = True

    def _close(self) -> None:
        self._listener.close()
        self._bell.close()
        for holding in self._holdings:
            holding.close()

    def _handle_lines(self) -> None:
        """Answer every request on a line; one that comes meanwhile rings again."""
        self._bell.silence()
        for holding in self._holdings:
            for identity, neighbour in list(holding.neighbours.items()):
                frames = neighbour.line.receive()
                if frames is not None:
                    neighbour.asked_on_line = True
                    holding.handle(identity, frames)

    def _handle_socket(self) -> None:
        frame, *frames = self._listener.socket.recv_multipart(copy=False)
        identity = frame.bytes
        holding = self._asked.get(identity, self._first)
        if identity in holding.neighbours:
            holding.neighbours[identity].asked_on_line = False
        holding.handle(identity, frames)
