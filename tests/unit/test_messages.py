"""Messages and the tensors in them: they read back as written, and what is malformed is refused."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.messages import FRAME_BYTES, Kind, Message, WireError, as_bytes, cut_for, from_frames, to_frames

# --- messages -------------------------------------------------------------------------------------------------------

LONGS = st.integers(-(2**63), 2**63 - 1)
BODIES = st.dictionaries(
    st.text(max_size=8),
    st.none() | st.booleans() | LONGS | st.text(max_size=8) | st.lists(LONGS, max_size=3),
    max_size=4,
)
MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    epoch=st.integers(0, 2**32 - 1),
    sender=st.integers(0, 2**32 - 1),
    flags=st.integers(0, 255),
    shard=st.integers(-(2**31), 2**31 - 1),
    clock=LONGS,
    iteration=LONGS,
    pause_at=LONGS,
    staleness=LONGS,
    tensor_bytes=LONGS,
    waiting_s=st.floats(allow_nan=False),
    body=BODIES,
    payload=st.lists(st.binary(max_size=20), max_size=4),
)


def frames(parts: Sequence[Any]) -> list[zmq.Frame]:
    return [zmq.Frame(bytes(part)) for part in parts]


@given(message=MESSAGES)
def test_messages_read_back_as_written(message: Message) -> None:
    read = Message.decode(frames(message.encode()), epoch=message.epoch)
    assert [bytes(frame) for frame in read.payload] == message.payload
    for name in (field.name for field in fields(message)):
        if name != "payload":
            assert getattr(read, name) == getattr(message, name), name


@given(message=MESSAGES, epoch=st.integers(0, 2**32 - 1))
def test_a_message_of_another_epoch_is_refused(message: Message, epoch: int) -> None:
    raw = frames(message.encode())
    if epoch != message.epoch:
        with pytest.raises(WireError, match=f"membership epoch {message.epoch}; this is epoch {epoch}"):
            Message.decode(raw, epoch=epoch)


@given(parts=st.lists(st.binary(max_size=80), max_size=4))
def test_bytes_that_are_no_message_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(WireError, match="malformed"):
        Message.decode(frames(parts), epoch=0)


GOOD = Message(Kind.PULL, 7, body={"a": 1}).encode()


@pytest.mark.parametrize(
    "parts",
    [
        [],
        GOOD[:1],
        [GOOD[0][:-1], b""],
        [bytes(GOOD[0]) + b"\0", b""],
        [b"P2" + bytes(GOOD[0])[2:], b""],
        [bytes(GOOD[0])[:2] + b"\xff" + bytes(GOOD[0])[3:], b""],
        [GOOD[0], b"{"],
        [GOOD[0], b"[1]"],
        [GOOD[0], b"1"],
        [GOOD[0], b"null"],
        [GOOD[0], b'{"a": "\xff"}'],
        [GOOD[0], b"\xff\xfe"],
        [GOOD[0], b"[" * 100_000],
    ],
    ids=[
        "no frame",
        "one frame",
        "short",
        "long",
        "magic",
        "kind",
        "json",
        "list",
        "number",
        "null",
        "utf-8",
        "binary",
        "deep",
    ],
)
def test_malformed_messages_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(WireError, match="refused a malformed message"):
        Message.decode(frames(parts), epoch=7)


def test_a_pickle_is_never_read() -> None:
    class Malice:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("it was executed",)

    for parts in ([GOOD[0], pickle.dumps(Malice())], [pickle.dumps(Malice()), b""]):
        with pytest.raises(WireError):
            Message.decode(frames(parts), epoch=7)


@pytest.mark.parametrize("field", ["clock", "iteration", "pause_at", "staleness", "tensor_bytes"])
def test_a_number_that_does_not_fit_is_no_message(field: str) -> None:
    with pytest.raises(struct.error):
        Message(Kind.PULL, 0, **{field: 2**63}).encode()


def test_bodies_are_json() -> None:
    assert json.loads(bytes(Message(Kind.OK, 0, body={"a": [1, "x"]}).encode()[1])) == {"a": [1, "x"]}
    with pytest.raises(TypeError):
        Message(Kind.OK, 0, body={"a": object()}).encode()


# --- tensors --------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@given(forms=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6))
def test_tensors_cross_as_they_are(forms: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    sent = [filled(shape, dtype, index) for index, (shape, dtype) in enumerate(forms)]
    received = [torch.zeros_like(tensor) for tensor in sent]
    raw = to_frames(sent)
    for wrapped in (raw, [bytes(frame) for frame in raw], frames(raw)):
        for tensor in received:
            tensor.zero_()
        from_frames(wrapped, received)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(received, sent, strict=True))


@pytest.mark.parametrize("num_elements", [FRAME_BYTES // 4 - 1, FRAME_BYTES // 4, FRAME_BYTES // 4 + 1, 700_001])
def test_large_tensors_are_cut_into_frames(num_elements: int) -> None:
    sent = [torch.arange(num_elements, dtype=torch.float32), torch.ones(3)]
    raw = to_frames(sent)
    assert all(len(frame) <= FRAME_BYTES for frame in raw)
    assert len(raw) == -(-num_elements * 4 // FRAME_BYTES) + 1
    received = [torch.zeros(num_elements), torch.zeros(3)]
    from_frames(raw, received)
    assert torch.equal(received[0], sent[0])
    assert torch.equal(received[1], sent[1])


def test_frames_are_the_tensors_own_memory() -> None:
    tensor = torch.zeros(4)
    (frame,) = to_frames([tensor])
    tensor[1] = 1.0
    assert bytes(frame) == struct.pack("<4f", 0, 1, 0, 0)
    parameter = torch.nn.Parameter(torch.ones(2))
    from_frames([struct.pack("<2f", 3, 4)], [parameter])
    assert parameter.tolist() == [3, 4]


@pytest.mark.parametrize("sizes", [[], [8], [4, 4, 4], [16], [4, 9], [0]])
def test_frames_of_another_length_are_refused(sizes: list[int]) -> None:
    with pytest.raises(WireError, match=f"carries {sum(sizes)} bytes of tensors instead of 11"):
        from_frames([bytes(size) for size in sizes], [torch.zeros(2), torch.zeros(3, dtype=torch.uint8)])


@pytest.mark.parametrize("sizes", [[9, 2], [11], [4, 5, 2], [4, 7]])
def test_frames_that_cross_tensors_are_refused(sizes: list[int]) -> None:
    with pytest.raises(WireError, match="frames that cross tensors"):
        from_frames([bytes(size) for size in sizes], [torch.zeros(2), torch.zeros(3, dtype=torch.uint8)])


def test_frames_may_be_cut_in_any_way_within_a_tensor() -> None:
    received = [torch.zeros(2), torch.zeros(3, dtype=torch.uint8)]
    raw = struct.pack("<2f", 1, 2)
    from_frames([raw[:3], b"", raw[3:], b"\1\2\3", b""], received)
    assert [tensor.tolist() for tensor in received] == [[1, 2], [1, 2, 3]]


def test_one_frame_may_be_cut_for_several_tensors() -> None:
    received = [torch.zeros(2), torch.zeros(0), torch.zeros(3, dtype=torch.uint8)]
    raw = struct.pack("<2f", 1, 2) + b"\1\2\3"
    from_frames(cut_for([raw], received), received)
    assert [tensor.tolist() for tensor in received] == [[1, 2], [], [1, 2, 3]]


@pytest.mark.parametrize("size", [0, 7, 10, 12])
def test_one_frame_of_another_length_is_refused(size: int) -> None:
    tensors = [torch.zeros(2), torch.zeros(3, dtype=torch.uint8)]
    with pytest.raises(WireError, match=f"carries {size} bytes of tensors instead of 11"):
        from_frames(cut_for([bytes(size)], tensors), tensors)


def test_a_tensor_in_pieces_of_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        as_bytes(torch.zeros(4, 4)[:, 0])
    with pytest.raises(ValueError, match="must be contiguous"):
        from_frames([bytes(16)], [torch.zeros(4, 4)[:, 0]])
