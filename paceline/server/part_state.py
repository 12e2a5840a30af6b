"""What a server's shards hold, as messages give and take it: parameters at the start, and the optimizers' state."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from paceline.errors import UsageError
from paceline.messages import Message, WireError, from_frames
from paceline.server.part import Part
from paceline.server.state import export_state, import_state, pack, unpack


def initialise(part: Part, message: Message, parameters: Sequence[Tensor] | None) -> None:
    """Begin at the message's iteration with a worker's `parameters`; if they are out of reach, the message has them.
    Raises WireError if the message's do not fit."""
    if parameters is None:
        from_frames(message.payload, part.shard.parameters)
    else:
        for own, given in zip(part.shard.parameters, parameters, strict=True):
            own.copy_(given)
    part.frames = None
    part.shard.begin_at(message.iteration)


def states_of(parts: Sequence[Part]) -> dict[str, Tensor]:
    """All shards' optimizers' state, keyed by the piece's index in the server's range. Tensors are no copies.

    Raises:
        UsageError: a state is neither tensor nor number.
    """
    state: dict[str, Tensor] = {}
    for first, part in _numbered(parts):
        state |= export_state(part.shard.optimizer, part.shard.parameters, first_piece=first)
    return state


def state_fields(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of a message with the state of all shards' optimizers. Raises WireError if a state cannot be sent."""
    try:
        body, frames = pack(states_of(parts))
    except UsageError as error:
        raise WireError(str(error)) from None
    payload = [bytes(frame) for frame in frames]
    return {"body": body, "payload": payload, "tensor_bytes": sum(map(len, payload))}


def set_state(parts: Sequence[Part], message: Message) -> None:
    """The inverse of `state_fields`. Raises WireError if the message cannot be read, or the optimizer takes no
    state."""
    state = unpack(message.body, message.payload)
    try:
        for first, part in _numbered(parts):
            import_state(part.shard.optimizer, part.shard.parameters, state, first_piece=first)
    except UsageError as error:
        raise WireError(str(error)) from None


def _numbered(parts: Sequence[Part]) -> Iterator[tuple[int, Part]]:
    """Each part with the index of its first piece in the server's range."""
    first = 0
    for part in parts:
        yield first, part
        first += len(part.pieces)
