"""Torch's store for the workers of a run, kept by its launcher: asked over the run's encrypted sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, final

from torch.distributed import Store

from paceline.comm.wire import Caller, Keys
from paceline.errors import Aborted, PeerLost
from paceline.messages import Kind, Message, Raw, raw_bytes

_TURN_S = 0.01
_LOOK_S = 0.2
_ANSWER_WITHIN_S = 60.0
_PATIENCE = timedelta(seconds=300)


@final
class StoreKeeper:
    """The launcher's half: what has been set, by key."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def answer(self, request: Message) -> Message:
        body = request.body
        if "set" in body:
            self._values[str(body["set"])] = b"".join(map(raw_bytes, request.payload))
        if "add" in body:
            key = str(body["add"])
            self._values[key] = str(int(self._values.get(key, b"0")) + int(body["amount"])).encode()
        values = [self._values[key] for key in map(str, body["get"]) if key in self._values]
        return Message(Kind.STORED, request.epoch, clock=request.clock, payload=values)


@final
class RunStore(Store):
    """A worker's half, for use by any thread. What it waits for ends with the run, too.

    Nobody but the run's members can reach it, unlike torch's own TCPStore, which answers whoever connects. Keep a
    reference while torch uses it: its C++ side alone does not keep the Python object alive.
    """

    def __init__(self, keys: Keys, *, endpoint: str, identity: str, epoch: int) -> None:
        super().__init__()
        self._caller = Caller(keys, endpoint=endpoint, identity=identity)
        self._epoch = epoch
        self._lock = threading.Lock()
        self._num_requests = 0
        self._abort_reason: str | None = None

    def set(self, key: str, value: str | bytes) -> None:
        self._ask({"set": key, "get": []}, [value.encode() if isinstance(value, str) else value])

    def get(self, key: str) -> bytes:
        """The key's value, once it has one. Raises as `wait`."""
        self.wait([key])
        return self._ask({"get": [key]})[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask({"add": key, "amount": amount, "get": [key]})[0])

    def check(self, keys: Sequence[str]) -> bool:
        return len(self._ask({"get": list(keys)})) == len(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = _PATIENCE) -> None:
        """Block until all keys have a value.

        Raises:
            TimeoutError: they have none in time.
            Aborted: the run ended.
            PeerLost: the launcher does not answer.
        """
        give_up_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"timed out waiting for {list(keys)}")
            time.sleep(_TURN_S)

    def clone(self) -> RunStore:
        """NCCL asks for one, to use it in a thread of its own."""
        return self

    def abort(self, reason: str) -> None:
        """End every wait; callable from any thread."""
        self._abort_reason = reason

    def close(self) -> None:
        with self._lock:
            self._caller.close()

    def _ask(self, body: Mapping[str, Any], payload: Sequence[Raw] = ()) -> list[bytes]:
        with self._lock:
            self._num_requests += 1
            self._caller.send(Message(Kind.STORE, self._epoch, clock=self._num_requests, body=body, payload=payload))
            give_up_s = time.monotonic() + _ANSWER_WITHIN_S
            while time.monotonic() < give_up_s:
                if self._abort_reason is not None:
                    raise Aborted(self._abort_reason)
                self._caller.socket.poll(int(_LOOK_S * 1000))
                frames = self._caller.receive()
                if frames is not None:
                    answer = Message.decode(frames, epoch=self._epoch)
                    if answer.clock == self._num_requests:
                        return [bytes(raw_bytes(value)) for value in answer.payload]
        raise PeerLost(f"the launcher, where ranks meet, has not answered within {_ANSWER_WITHIN_S:g} s")
