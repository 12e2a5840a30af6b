"""A store's servers: in processes of this host."""

import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import final

import torch

from paceline.comm.wire import Keys, Listener
from paceline.errors import RunFailed, UsageError
from paceline.kv.requests import EPOCH
from paceline.kv.server_core import ServerCore
from paceline.kv.spec import Spec
from paceline.kv.store import Store, identity_of
from paceline.messages import Message, Raw, WireError

_LOOK_MS = 200
_START_S = 120.0
_END_S = 10.0


@final
@dataclass(frozen=True)
class Group:
    """A store's servers, as workers are told of them. Whoever has it can read and change the store: hand it over as
    an argument to the processes that are to be workers."""

    spec: Spec
    keys: Keys
    endpoints: tuple[str, ...]

    def connect(self, worker: int, *, deadline_s: float | None = 60.0) -> Store:
        """
        Args:
            worker: its number, from 0; nobody else may have it.
            deadline_s: how long servers may be silent while an answer is due; none: for ever.

        Raises:
            UsageError: there is no such worker.
        """
        if type(worker) is not int or not 0 <= worker < self.spec.workers:
            raise UsageError(f"a store of {self.spec.workers} workers has none of number {worker!r}")
        return Store(self.spec, self.keys, self.endpoints, worker=worker, deadline_s=deadline_s)


@final
class Server:
    """One server of a store. Raises UsageError if the spec's rule or functions cannot be had here.

    Args:
        keys: of the store.
        host: the address to listen on.
    """

    def __init__(self, spec: Spec, index: int, keys: Keys, *, host: str) -> None:
        self._core = ServerCore(spec, index)
        self._listener = Listener(keys, host=host)
        self.endpoint = self._listener.endpoint
        self._is_stopping = threading.Event()

    def serve(self) -> None:
        """Answer until every worker has left, or `stop` is called."""
        try:
            while not self._core.is_deserted and not self._is_stopping.is_set():
                if self._listener.socket.poll(_LOOK_MS):
                    asked = self._listener.receive()
                    if asked is not None:
                        self._handle(*asked)
        finally:
            self._listener.close()

    def stop(self) -> None:
        """Callable from any thread."""
        self._is_stopping.set()

    def _handle(self, identity: bytes, frames: Sequence[Raw]) -> None:
        try:
            message = Message.decode(frames, epoch=EPOCH)
        except WireError:
            return  # nobody of ours: there is no request to answer
        if identity == identity_of(message.sender).encode():
            for worker, answer in self._core.receive(message):
                self._listener.send(identity_of(worker).encode(), answer)


@contextmanager
def serve(spec: Spec) -> Iterator[Group]:
    """A store whose servers are processes of this host, until the block ends.

    They import this program's main module, as processes of `multiprocessing` do: what starts them stands under
    `if __name__ == "__main__"`.

    Raises:
        UsageError: servers cannot import the spec's functions or rule.
        RunFailed: a server ended before it listened.
    """
    keys, spawning = Keys.generate(), multiprocessing.get_context("spawn")
    ends = [spawning.Pipe() for _ in range(spec.servers)]
    processes = [
        spawning.Process(target=_serve, args=(spec, index, keys, theirs), daemon=True, name=f"kv-server-{index}")
        for index, (_, theirs) in enumerate(ends)
    ]
    try:
        for process in processes:
            process.start()
        for _, theirs in ends:
            theirs.close()
        yield Group(spec, keys, tuple(_endpoint(index, ours) for index, (ours, _) in enumerate(ends)))
    finally:
        for ours, _ in ends:
            ours.close()  # which is a server's word to end
        for process in processes:
            if process.pid is not None:
                process.join(_END_S)
                process.kill()  # it does nothing to one that has ended
                process.join()


def _endpoint(index: int, pipe: Connection) -> str:
    try:
        said = pipe.recv_bytes() if pipe.poll(_START_S) else b""
    except EOFError:
        said = b""
    if not said:
        raise RunFailed(f"server {index} of a store ended before it listened, or took more than {_START_S:g} s")
    is_refused, text = said[:1] == b"!", said[1:].decode()
    if is_refused:
        raise UsageError(f"server {index} of a store: {text}")
    return text


def _serve(spec: Spec, index: int, keys: Keys, pipe: Connection) -> None:
    """A server's process."""
    torch.set_num_threads(1)
    try:
        server = Server(spec, index, keys, host="127.0.0.1")
    except UsageError as error:
        pipe.send_bytes(f"!{error}".encode())
        return
    pipe.send_bytes(f"={server.endpoint}".encode())

    def stop_with_parent() -> None:
        pipe.poll(None)  # it says nothing: what comes is the end of the pipe, also when it has died
        server.stop()

    threading.Thread(target=stop_with_parent, daemon=True).start()
    server.serve()
