"""A file that one process offers and another copies over sockets."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from paceline.comm.file_sockets import OfferedFile, copy_file
from paceline.comm.wire import Caller, Keys, Listener
from paceline.errors import PeerLost
from paceline.messages import FRAME_BYTES, Kind, Message

EPOCH = 3


def memory(content: bytes = b"") -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    return descriptor


def content_of(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


@pytest.mark.parametrize("num_bytes", [0, 1, FRAME_BYTES, 20 * FRAME_BYTES + 7])
def test_several_copy_it_at_once_and_each_piece_crosses_once(monkeypatch, num_bytes: int) -> None:
    """It outlives the descriptor that it was offered by."""
    keys, content = Keys.generate(), random.Random(num_bytes).randbytes(num_bytes)
    descriptor = memory(content)
    offered = OfferedFile(descriptor, keys, host="127.0.0.1", epoch=EPOCH)
    os.close(descriptor)
    sent: list[int] = []
    send = Caller.send
    monkeypatch.setattr(Caller, "send", lambda self, message: (sent.append(message.clock), send(self, message)))
    copies = [memory(), memory()]
    given = {"endpoint": offered.endpoint, "num_bytes": num_bytes, "epoch": EPOCH, "patience_s": 60.0}
    threads = [
        threading.Thread(target=copy_file, args=(copy, keys), kwargs={**given, "identity": f"joiner-{copy}"})
        for copy in copies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    offered.withdraw()
    assert [content_of(copy) for copy in copies] == [content, content]
    assert sorted(sent) == sorted([*range(0, num_bytes, FRAME_BYTES)] * 2)
    for copy in copies:
        os.close(copy)


@pytest.mark.parametrize("stranger", ["silent", "ends"])
def test_whoever_does_not_answer_is_lost(stranger: str) -> None:
    """At once where the connection ends, as that of a process that dies; otherwise by the deadline."""
    keys, copy = Keys.generate(), memory()
    listener = Listener(keys, host="127.0.0.1")
    ends = threading.Thread(target=lambda: (listener.socket.recv_multipart(), listener.close()))
    if stranger == "ends":
        ends.start()
    patience_s = 0.3 if stranger == "silent" else 60.0
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="has ended, or does not answer"):
        copy_file(
            copy, keys, endpoint=listener.endpoint, num_bytes=9, identity="joiner-1", epoch=EPOCH, patience_s=patience_s
        )
    assert time.monotonic() - began_s < 30
    if stranger == "ends":
        ends.join()
    listener.close()
    os.close(copy)


@pytest.mark.parametrize("content", [b"", b"eight by", b"ten  bytes"])
def test_a_piece_of_another_length_is_refused(content: bytes) -> None:
    keys, copy = Keys.generate(), memory()
    listener = Listener(keys, host="127.0.0.1")

    def answer() -> None:
        asked = listener.receive()
        assert asked is not None
        listener.send(asked[0], Message(Kind.PIECE, EPOCH, clock=0, payload=[content] if content else []))

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(PeerLost, match="no piece of it"):
        copy_file(
            copy, keys, endpoint=listener.endpoint, num_bytes=9, identity="joiner-1", epoch=EPOCH, patience_s=60.0
        )
    thread.join()
    listener.close()
    os.close(copy)


def test_what_is_no_question_is_left_unanswered() -> None:
    """Of another epoch, of another kind, or no message at all; who asks well is answered all the same."""
    keys, descriptor = Keys.generate(), memory(b"content")
    offered = OfferedFile(descriptor, keys, host="127.0.0.1", epoch=EPOCH)
    caller = Caller(keys, endpoint=offered.endpoint, identity="stranger")
    caller.send(Message(Kind.PIECE, EPOCH + 1))
    caller.send(Message(Kind.PIECE, EPOCH, clock=-1))
    caller.send(Message(Kind.PULL, EPOCH))
    caller.socket.send_multipart([b"nothing", b"{"])
    caller.send(Message(Kind.PIECE, EPOCH, clock=3))
    assert caller.socket.poll(60_000)
    answer = Message.decode(caller.receive() or [], epoch=EPOCH)
    assert (answer.clock, bytes(answer.payload[0])) == (3, b"tent")
    assert not caller.socket.poll(100)
    offered.withdraw()
    caller.close()
    os.close(descriptor)
