"""Bringing a model, an optimizer or any object from one rank to the others."""

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.comm.objects import decode_object, encode_object
from paceline.errors import UsageError
from paceline.horovod import runtime as basics
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.torch.collectives import allgather, broadcast_, broadcast_async_
from paceline.horovod.torch.operations import synchronize

_PLAIN, _PICKLED = 0, 1


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors with the root's.

    Args:
        params: a model's `state_dict()`, or its `named_parameters()` or `parameters()` as a list.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(params, Mapping):
        named: Iterable[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in named if isinstance(tensor, Tensor)]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give an optimizer the root's state and hyperparameters.

    One that has not stepped has gradients of zero afterwards where it had none, as scripts expect of Horovod.

    Raises:
        ValueError: LBFGS, whose state is no plain table.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
    state = broadcast_object(optimizer.state_dict(), root_rank, name="optimizer state")
    if basics.runtime().rank != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object on all ranks; what the others pass is ignored. Raises UsageError as `encode`."""
    name = name or "object"
    is_root = basics.runtime().rank == root_rank
    raw = encode(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(raw)])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    content = raw if is_root else torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, f"{name}.content", process_set)
    return obj if is_root else decode(content)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """All ranks' objects, in rank order. Raises UsageError as `encode`."""
    name = name or "object"
    raw = encode(obj)
    lengths = allgather(torch.tensor([len(raw)]), name=f"{name}.length").tolist()
    return [decode(part) for part in allgather(raw, name=f"{name}.content").split(lengths)]


def encode(value: Any) -> Tensor:
    """An object as bytes. Plain data and tensors travel anywhere; other objects are pickled, among ranks of one host.

    Raises:
        UsageError: another object, and ranks are on several hosts, whose links anybody on the network may write to.
    """
    try:
        kind, raw = _PLAIN, encode_object(value)
    except TypeError as error:
        if not basics.runtime().is_one_host:
            raise UsageError(
                f"{error}; between hosts nothing is unpickled, since anybody on the network could run code so: turn "
                "the object into a dictionary of plain values and tensors"
            ) from None
        kind, raw = _PICKLED, torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return torch.cat([torch.tensor([kind], dtype=torch.uint8), raw])


def decode(raw: Tensor) -> Any:
    """The inverse of `encode`."""
    if int(raw[0]) == _PLAIN:
        return decode_object(raw[1:].clone())
    if not basics.runtime().is_one_host:
        raise UsageError("another host sent a pickled object; nothing of the network is unpickled")
    return pickle.loads(raw[1:].numpy().tobytes())
