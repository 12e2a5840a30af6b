"""What a worker asks a server, as a message and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from paceline.kv.key_cache import KeyCache, signature_of
from paceline.kv.spec import Pairs, Spec
from paceline.messages import Kind, Message, Raw, WireError, as_bytes, from_frames, raw_bytes, to_frames

EPOCH = 1
Keys = Tensor | range
"""Ascending, none twice; a range stands for all of its keys."""
WITH_VALUES = frozenset({Kind.INIT_VALUES, Kind.PUSH_VALUES})


@final
@dataclass(frozen=True)
class Request:
    """One worker's, to one server, about keys of that server."""

    kind: Kind
    worker: int
    timestamp: int
    """The number of the worker's request; it ascends."""
    keys: Keys = range(0)
    values: Tensor | None = None
    """What is pushed, shape (keys, dim)."""
    function: str = "add"
    within: range = range(0)
    """The range that the push is all about: the worker's clock advances in it."""
    after: Sequence[int] = ()
    """Timestamps of earlier requests that are to be finished first."""
    clock: int = 0
    """Workers' clocks in the range of the keys are to have come to this first."""
    drops: bool = False
    """The worker leaves: what it has asked for and has not begun yet never will."""

    def message(self, cache: KeyCache) -> Message:
        """
        Args:
            cache: of this worker's lists that the server knows.
        """
        about = {"after": list(self.after), "clock": self.clock, "drops": self.drops}
        body: dict[str, Any] = {name: value for name, value in about.items() if value}
        if self.kind is Kind.PUSH_VALUES:
            body |= {"function": self.function, "within": [self.within.start, self.within.stop]}
        tensors = []
        if isinstance(self.keys, range) or not len(self.keys):
            keys = self.keys if isinstance(self.keys, range) else range(0)
            body["range"] = [keys.start, keys.stop]
        else:
            signature = signature_of(self.keys)
            is_known = cache.knows(signature, self.keys)
            body |= {"signature": signature} if is_known else {"signature": signature, "count": len(self.keys)}
            tensors += [] if is_known else [self.keys]
        tensors += [] if self.values is None else [self.values]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        return Message(
            self.kind,
            EPOCH,
            self.worker,
            clock=self.timestamp,
            tensor_bytes=num_bytes,
            body=body,
            payload=to_frames(tensors),
        )

    @classmethod
    def of(cls, message: Message, spec: Spec, cache: KeyCache, owned: range) -> "Request":
        """
        Args:
            cache: of this worker's lists.
            owned: the keys of the server that is asked.

        Raises:
            WireError: this is no request of such a server.
        """
        body = message.body
        try:
            within, after = range(*body.get("within", (owned.start, owned.start))), tuple(body.get("after", ()))
            clock, function = body.get("clock", 0), str(body.get("function", "add"))
            keys, values = _content(message, spec, cache)
            counts = [message.clock, clock, *after]
            if any(type(number) is not int or number < 0 for number in counts):
                raise ValueError(f"timestamps and clocks are whole numbers, not {counts}")
            if any(earlier >= message.clock for earlier in after):
                raise ValueError(f"request {message.clock} cannot wait for {after}, which are not before it")
            if len(keys) and not owned.start <= int(keys[0]) <= int(keys[-1]) < owned.stop:
                raise ValueError(
                    f"keys {int(keys[0])} to {int(keys[-1])} are none of {owned.start} to {owned.stop - 1}"
                )
            if within.step != 1 or not owned.start <= within.start <= within.stop <= owned.stop:
                raise ValueError(f"{within} is not within {owned}")
            if message.kind is Kind.PUSH_VALUES and len(keys) and (keys[0] < within.start or keys[-1] >= within.stop):
                raise ValueError(f"keys {int(keys[0])} to {int(keys[-1])} are not all within {within}")
            return cls(
                message.kind,
                message.sender,
                message.clock,
                keys,
                values,
                function,
                within,
                after,
                clock,
                drops=bool(body.get("drops")),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"refused {message.kind.name} of worker {message.sender}: {error}") from None


class _Content(NamedTuple):
    keys: Keys
    values: Tensor | None


def _content(message: Message, spec: Spec, cache: KeyCache) -> _Content:
    body, with_values = message.body, message.kind in WITH_VALUES
    num_bytes = sum(len(raw_bytes(frame)) for frame in message.payload)
    value_bytes = spec.dim * spec.dtype.itemsize if with_values else 0
    if "range" in body:
        start, stop = body["range"]
        keys: Keys = range(start, stop)
        new = None
    elif "count" in body:
        count = body["count"]
        if type(count) is not int or not 0 < count * (8 + value_bytes) == num_bytes:
            raise ValueError(f"{count!r} keys and their values in {num_bytes} bytes")
        keys = new = torch.empty(count, dtype=torch.int64)
    else:
        keys, new = cache.recall(body["signature"]), None
    if len(keys) * (value_bytes + (8 if new is not None else 0)) != num_bytes:
        raise ValueError(f"{len(keys)} keys need {len(keys) * value_bytes} bytes of values, not {num_bytes}")
    values = torch.empty(len(keys), spec.dim, dtype=spec.dtype) if with_values else None
    from_frames(message.payload, [tensor for tensor in (new, values) if tensor is not None])
    if new is not None:
        require_ascending(new)
        cache.note(str(body["signature"]), new)
    return _Content(keys, values)


def require_ascending(keys: Tensor) -> None:
    """Raises ValueError, which names a key that does not follow the one before it."""
    is_wrong = keys[1:] <= keys[:-1]
    if is_wrong.any():
        place = int(is_wrong.nonzero()[0]) + 1
        raise ValueError(f"keys ascend, and none comes twice: {int(keys[place])} follows {int(keys[place - 1])}")


def pack_values(values: Tensor) -> tuple[Mapping[str, Any], list[Raw]]:
    """Rows as an answer's body and payload: without rows of zeros, where that is shorter."""
    rows = values.any(dim=1)
    mask = np.packbits(rows.numpy())
    some = values[rows]
    if len(mask) + some.nbytes < values.nbytes:
        return {"rows": len(some)}, [*to_frames([torch.from_numpy(mask)]), *to_frames([some])]
    return {}, list(to_frames([values]))


def unpack_values(body: Mapping[str, Any], payload: Sequence[Raw], values: Tensor) -> None:
    """Put what `pack_values` gave into these rows. Raises WireError if it does not fit them."""
    if "rows" not in body:
        from_frames(payload, [values])
        return
    mask = torch.empty((len(values) + 7) // 8, dtype=torch.uint8)
    some = torch.empty(body["rows"], values.shape[1], dtype=values.dtype)
    from_frames(payload, [mask, some])
    rows = np.unpackbits(np.frombuffer(as_bytes(mask), dtype=np.uint8), count=len(values)).astype(bool)
    values.zero_()
    values[torch.from_numpy(rows)] = some


def pack_pairs(pairs: Pairs) -> tuple[Mapping[str, Any], list[Raw]]:
    keys, values = (tensor.contiguous() for tensor in pairs)
    return {"count": len(keys)}, list(to_frames([keys, values]))


def unpack_pairs(body: Mapping[str, Any], payload: Sequence[Raw], spec: Spec) -> Pairs:
    pairs = Pairs(torch.empty(body["count"], dtype=torch.int64), torch.empty(body["count"], spec.dim, dtype=spec.dtype))
    from_frames(payload, pairs)
    return pairs
