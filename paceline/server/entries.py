"""What one copy of a key range tells the next: entries, each of which is one change, as messages."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.messages import ALL_SHARDS, Kind, Message, WireError, from_frames, to_frames
from paceline.server.part import Part
from paceline.server.part_state import initialise, set_state
from paceline.server.shard import Closed

_CLOSED, _PARAMETERS, _STATE, _LEFT = "closed", "parameters", "state", "left"


def of_closed(index: int, part: Part, closed: Closed) -> Message:
    """A shard closes a clock: the update's gradient, already joined, so one copy of it whatever the number of workers
    (Li et al., OSDI 2014, section 4.3, replication after aggregation)."""
    body = {
        "what": _CLOSED,
        "contributors": [[worker, *numbers] for worker, numbers in closed.contributors.items()],
        "clocks": [[worker, *numbers] for worker, numbers in closed.clocks.items()],
        "groups": [[worker, groups] for worker, groups in closed.groups.items()],
        "stop": closed.stop,
        "is_void": closed.gradients is None,
    }
    return _entry(body, shard=index, tensors=closed.gradients or ())


def of_request(message: Message, parts: Sequence[Part]) -> list[Message]:
    """What a worker's message has changed besides: the parameters at the start, the optimizers' state, who is there."""
    if message.kind is Kind.INITIALISE:
        chosen = range(len(parts)) if message.shard == ALL_SHARDS else (message.shard,)
        body = {"what": _PARAMETERS}
        return [
            _entry(body, shard=index, tensors=parts[index].shard.parameters, iteration=message.iteration)
            for index in chosen
        ]
    if message.kind is Kind.SET_STATE:
        entry = _entry({**message.body, "what": _STATE})
        entry.payload, entry.tensor_bytes = [bytes(frame) for frame in message.payload], message.tensor_bytes
        return [entry]
    return [_entry({"what": _LEFT, "worker": message.sender})] if message.kind is Kind.LEAVE else []


def apply(entry: Message, parts: Sequence[Part], gradients: Sequence[Sequence[Tensor]]) -> None:
    """Do what the entry says.

    Args:
        gradients: for each shard, where those of an entry are put while they are used.

    Raises:
        WireError: it is no entry for these shards.
    """
    what, body = entry.body.get("what"), entry.body
    try:
        if what == _CLOSED:
            part = parts[entry.shard]
            joined = None if body["is_void"] else gradients[entry.shard]
            if joined is not None:
                from_frames(entry.payload, joined)
            part.shard.repeat(_closed(body, joined))
        elif what == _PARAMETERS:
            initialise(parts[entry.shard], entry, None)
            for worker in parts[entry.shard].shard.rule.members.ranks:
                parts[entry.shard].shard.pulled(worker)
        elif what == _STATE:
            set_state(parts, entry)
        elif what == _LEFT:
            for part in parts:
                part.shard.leave(body["worker"])
        else:
            raise ValueError(f"{what!r} is none")
    except (LookupError, TypeError, ValueError) as error:
        raise WireError(f"refused an entry of another copy: {error}") from None


def zeroed(parts: Sequence[Part]) -> list[list[Tensor]]:
    """Where `apply` puts gradients."""
    return [[torch.zeros_like(parameter) for parameter in part.shard.parameters] for part in parts]


def _entry(body: Mapping[str, Any], *, tensors: Sequence[Tensor] = (), **fields: Any) -> Message:
    # The tensors change before a socket has read them, and the next copy may have to be told again: a copy.
    payload = [bytes(frame) for frame in to_frames(tensors)]
    return Message(Kind.REPLICATE, 0, body=body, payload=payload, tensor_bytes=sum(map(len, payload)), **fields)


def _closed(body: Mapping[str, Any], gradients: Sequence[Tensor] | None) -> Closed:
    return Closed(
        gradients,
        {worker: (clock, staleness) for worker, clock, staleness in body["contributors"]},
        {worker: (clock, pulled_at) for worker, clock, pulled_at in body["clocks"]},
        {worker: [_hyperparameters(group) for group in groups] for worker, groups in body["groups"]},
        body["stop"],
    )


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where optimizers have tuples (betas)."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
