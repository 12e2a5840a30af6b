"""What collectives move as objects arrives as it was, and names no class on the way."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import objects
from paceline.comm.objects import decode_object, encode_object

GRID = torch.arange(6.0).reshape(2, 3)
IN_TORCHS_FORMAT = b"PK"


def travelled(value: Any) -> Any:
    return decode_object(encode_object(value))


def first_bytes(value: Any) -> bytes:
    return bytes(encode_object(value)[:2].tolist())


def with_attribute() -> Tensor:
    tensor = GRID.clone()
    tensor.scale = 2.0  # type: ignore[attr-defined]
    return tensor


def shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.layout, value.requires_grad, value.shape, value.to_dense().tolist(), vars(value)
    if isinstance(value, dict):
        return type(value), {key: shown(each) for key, each in value.items()}
    return (type(value), [shown(each) for each in value]) if isinstance(value, list | tuple) else value


PLAIN = [None, 1, "a", b"b", 2.5, True, [1, (2, {3})], {"a": {1: None}}]
DENSE = [
    GRID,
    torch.tensor(3),
    torch.zeros(0, 3),
    *(GRID.to(each) for each in objects._DTYPES.values()),
]
OTHERS = [
    GRID.T,
    GRID[:, 1],
    GRID[1],
    torch.zeros(1).expand(3),
    GRID.clone().requires_grad_(),
    GRID.to_sparse(),
    with_attribute(),
    GRID.to(torch.complex64),
    torch.Size([2]),
]


@pytest.mark.parametrize("value", [*PLAIN, *DENSE, {"x": [GRID, None]}], ids=repr)
def test_plain_data_and_dense_tensors_travel_as_they_are(value: Any) -> None:
    assert first_bytes(value) != IN_TORCHS_FORMAT
    assert shown(travelled(value)) == shown(value)


@pytest.mark.parametrize("value", [*OTHERS, OrderedDict(x=GRID)], ids=repr)
def test_what_else_torch_reads_travels_in_its_format(value: Any) -> None:
    assert first_bytes(value) == IN_TORCHS_FORMAT
    assert shown(travelled(value)) == shown(value)


def test_tensors_that_share_memory_still_do() -> None:
    whole, view = travelled([GRID, GRID.view(-1)])
    whole.zero_()
    assert view.count_nonzero() == 0


def test_a_tensor_keeps_its_strides() -> None:
    assert travelled(GRID.T).stride() == GRID.T.stride()


def test_a_tensor_arrives_where_it_was_wherever_others_are_made() -> None:
    with torch.device("meta"):
        assert travelled(GRID).equal(GRID)


def test_tensors_without_memory_are_alike() -> None:
    assert [each.shape for each in travelled([torch.zeros(0), torch.zeros(0, 3)])] == [(0,), (0, 3)]


def test_a_tensor_that_is_there_twice_stays_one() -> None:
    first, second = travelled([GRID, GRID])
    assert first is second


def test_nobody_writes_into_what_was_sent() -> None:
    sent = GRID.clone()
    travelled(sent).zero_()
    assert sent.equal(GRID)


@pytest.mark.parametrize("value", [object(), GRID.numpy(), int, len, [OrderedDict(x=object())]])
def test_what_would_need_free_unpickling_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="only plain data and tensors can be exchanged, not"):
        encode_object(value)


class Runs:
    def __reduce__(self) -> Any:
        return print, ("run",)


class Makes:
    """A tensor of other bytes than it says."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.said = dtype, shape, b"1234"

    def __reduce__(self) -> Any:
        return objects._tensor, self.said


NO_TENSORS = [
    *(Makes("torch.float32", (2,)), Makes("torch.uint8", (10**9,)), Makes("torch.uint8", (-2, -2))),
    Makes("torch.object", (4,)),
]


@pytest.mark.parametrize("value", [Runs(), *NO_TENSORS])
def test_other_pickles_are_refused(value: Any) -> None:
    with pytest.raises(pickle.UnpicklingError):
        decode_object(torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8))


def test_a_pickle_cannot_change_how_tensors_are_made() -> None:
    """It sets an attribute of what it has been given for `_tensor`."""
    with pytest.raises((pickle.UnpicklingError, AttributeError)):
        decode_object(torch.frombuffer(bytearray(_sets_an_attribute()), dtype=torch.uint8))
    assert travelled(GRID).equal(GRID)


def _sets_an_attribute() -> bytes:
    state = pickle.dumps((None, {"__name__": "another"}), protocol=2)[2:-1]
    return b"\x80\x02cpaceline.comm.objects\n_tensor\n" + state + b"b."
