"""How unevenly connections share the way between two hosts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import zmq

from paceline.comm.wire import Caller, Keys, Kind, Message, WireError
from paceline.probing.echo import EPOCH

NUM_CONNECTIONS = 8
"""As many as a host of five has with a server on each."""
_PIECE_BYTES = 2**16
_NUM_UNDER_WAY = 64
"""Of a connection: more than its window, which is what is to decide."""
_STREAM_S = 1.0
_ANSWER_S = 30.0
_NUM_TRIES = 3
_LEAST_SHARE = 0.02
"""Of an even share: one that gets less could get nothing, which has no logarithm."""
_LEAST_PIECES = 10
"""A connection, for shares to be more than chance: about 40 Mbit/s."""


def measure_unevenness(keys: Keys, endpoint: str, *, name: str) -> float | None:
    """The standard deviation of the logarithm of what connections get that begin to push to a host at the same time.

    None where too little passes in a second to say.

    Args:
        name: of the caller; no other may have it.

    Raises:
        WireError: the other host does not answer.
    """
    logarithms: list[float] = []
    for attempt in range(_NUM_TRIES):
        callers = [
            Caller(keys, endpoint=endpoint, identity=f"{name}-{attempt}-{number}") for number in range(NUM_CONNECTIONS)
        ]
        try:
            counts = _answered(callers)
        finally:
            for caller in callers:
                caller.close()
        if sum(counts) < _LEAST_PIECES * NUM_CONNECTIONS:
            return None
        logarithms += logarithms_of_shares(counts)
    return statistics.pstdev(logarithms)


def logarithms_of_shares(counts: Sequence[int]) -> list[float]:
    """Of what each of some got, beside an even share."""
    even = sum(counts) / len(counts)
    return [math.log(max(count / even, _LEAST_SHARE)) for count in counts]


def _answered(callers: Sequence[Caller]) -> list[int]:
    """How many pieces of each were taken in a second."""
    greeting, piece = Message(Kind.EXCHANGE, EPOCH), Message(Kind.EXCHANGE, EPOCH, payload=[bytes(_PIECE_BYTES)])
    poller = zmq.Poller()
    for caller in callers:  # all have shaken hands before the first piece leaves
        caller.send(greeting)
        if not caller.socket.poll(int(_ANSWER_S * 1000)):
            raise WireError(f"no answer within {_ANSWER_S:g} s from a host that answered before; see its load")
        caller.socket.recv_multipart()
        poller.register(caller.socket, zmq.POLLIN)
    by_socket = {caller.socket: number for number, caller in enumerate(callers)}
    counts = [0] * len(callers)
    for _ in range(_NUM_UNDER_WAY):
        for caller in callers:
            caller.send(piece)
    until_s = time.perf_counter() + _STREAM_S
    while (left_s := until_s - time.perf_counter()) > 0:
        for socket, _ in poller.poll(math.ceil(left_s * 1000)):
            number = by_socket[socket]
            socket.recv_multipart()
            counts[number] += 1
            callers[number].send(piece)
    return counts
