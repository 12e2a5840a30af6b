"""The server's end of secure aggregation."""

from collections.abc import Collection, Mapping
from typing import Literal, final

import numpy as np

from paceline.secure.client import SEALED_BYTES, PublicKeys, Revealed, add_common_mask, key_of
from paceline.secure.secrets import SHARE_BYTES, SecureError, Words, joined, mask, require_key

Stage = Literal["keys", "shares", "vectors", "unmasking"]
_STAGES: tuple[Stage, ...] = ("keys", "shares", "vectors", "unmasking")


@final
class Server:
    """Takes each stage's messages as they come, and gives answers when whoever carries them ends the stage.

    Whoever has not sent by then has dropped out. Vectors are added up as they arrive, so that none is kept.

    Args:
        neighbours: of each client, as `neighbours` draws them.
        threshold: shares that undo a mask.
        num_elements: of a vector.

    Raises:
        SecureError: from a `receive_...`: the message is refused, and nothing else changes. From what ends a stage: too
            few are left, and the round is over.
    """

    def __init__(self, neighbours: Mapping[int, Collection[int]], *, threshold: int, num_elements: int) -> None:
        self._neighbours = {client: frozenset(others) for client, others in neighbours.items()}
        self._threshold = threshold
        self._stage: Stage = "keys"
        self._keys: dict[int, PublicKeys] = {}
        self._sealed: dict[int, Mapping[int, bytes]] = {}
        self._sum: Words = np.zeros(num_elements, dtype=np.uint32)
        self._arrived: list[int] = []
        self._revealed: dict[int, Revealed] = {}

    @property
    def arrived(self) -> tuple[int, ...]:
        """The clients whose vectors the sum is of."""
        return tuple(self._arrived)

    # --- stage 1 ------------------------------------------------------------------------------------------------

    def receive_keys(self, client: int, keys: PublicKeys) -> None:
        self._accept("keys", client, allowed=self._neighbours, so_far=self._keys)
        if keys in self._keys.values():
            raise SecureError(f"client {client} has sent the keys of another one")
        for key in keys:
            require_key(key)
        self._keys[client] = keys

    def keys_for(self) -> dict[int, dict[int, PublicKeys]]:
        """Ends the stage: each remaining client's answer."""
        self._end("keys", self._keys)
        return {u: {v: self._keys[v] for v in self._near(u, self._keys)} for u in self._keys}

    # --- stage 2 ------------------------------------------------------------------------------------------------

    def receive_shares(self, client: int, sealed: Mapping[int, bytes]) -> None:
        self._accept("shares", client, allowed=self._keys, so_far=self._sealed)
        if set(sealed) != set(self._near(client, self._keys)):
            raise SecureError(f"client {client} has sent shares for {sorted(sealed)}, not for its neighbours")
        _require_sizes(client, sealed, SEALED_BYTES)
        self._sealed[client] = sealed

    def shares_for(self) -> dict[int, dict[int, bytes]]:
        """Ends the stage: each remaining client's answer."""
        self._end("shares", self._sealed)
        return {u: {v: self._sealed[v][u] for v in self._near(u, self._sealed)} for u in self._sealed}

    # --- stage 3 ------------------------------------------------------------------------------------------------

    def receive_vector(self, client: int, masked: Words) -> None:
        self._accept("vectors", client, allowed=self._sealed, so_far=self._arrived)
        if masked.shape != self._sum.shape or masked.dtype != np.uint32:
            raise SecureError(f"client {client} has sent {masked.dtype} of {masked.shape}, not {self._sum.shape} words")
        self._arrived.append(client)
        self._sum += masked

    def arrived_for(self) -> dict[int, list[int]]:
        """Ends the stage: each remaining client's answer."""
        self._end("vectors", self._arrived)
        return {u: [u, *self._near(u, self._arrived)] for u in self._arrived}

    def can_unmask(self) -> bool:
        """Whether those whose vectors have arrived can undo all masks, if they stay."""
        arrived = set(self._arrived)
        return all(len(({u} | self._neighbours[u]) & arrived) >= self._threshold for u in self._sealed)

    # --- stage 4 ------------------------------------------------------------------------------------------------

    def receive_revealed(self, client: int, revealed: Revealed) -> None:
        self._accept("unmasking", client, allowed=self._arrived, so_far=self._revealed)
        near = {client, *self._near(client, self._sealed)}
        if set(revealed.seeds) != near & set(self._arrived) or set(revealed.keys) != near - set(self._arrived):
            raise SecureError(f"client {client} has revealed shares that it was not asked for")
        _require_sizes(client, {**revealed.seeds, **revealed.keys}, SHARE_BYTES)
        self._revealed[client] = revealed

    def total(self) -> Words:
        """Ends the round: the sum modulo 2^32 over all clients whose vectors have arrived."""
        self._end("unmasking", self._revealed)
        total = self._sum.copy()
        for u in self._arrived:
            held = {v: each.seeds[u] for v, each in self._revealed.items() if u in each.seeds}
            total -= mask(joined(self._shares_of(u, held)), len(total))
        for gone in self._sealed.keys() - set(self._arrived):
            held = {v: each.keys[gone] for v, each in self._revealed.items() if gone in each.keys}
            key = key_of(self._shares_of(gone, held), self._keys[gone].masks, number=gone)
            for u in self._near(gone, self._arrived):
                # As that client itself would have.
                add_common_mask(total, key, self._keys[u].masks, sign=1 if gone > u else -1)
        return total

    def _near(self, client: int, among: Collection[int]) -> list[int]:
        return sorted(self._neighbours[client] & set(among))

    def _shares_of(self, client: int, held: Mapping[int, bytes]) -> dict[int, bytes]:
        if len(held) < self._threshold:
            raise SecureError(
                f"{len(held)} neighbours of client {client} have revealed their shares of its secret, and "
                f"{self._threshold} must: its mask cannot be undone"
            )
        return {v: held[v] for v in sorted(held)[: self._threshold]}

    def _accept(self, stage: Stage, client: int, *, allowed: Collection[int], so_far: Collection[int]) -> None:
        if self._stage != stage or client not in allowed or client in so_far:
            raise SecureError(f"refused {stage} from client {client}: it is not due, or has come already")

    def _end(self, stage: Stage, left: Collection[int]) -> None:
        if self._stage != stage:
            raise SecureError(f"the stage is {self._stage}, not {stage}")
        if len(left) < self._threshold:
            raise SecureError(f"{len(left)} clients are left after {stage}, and {self._threshold} must be")
        self._stage = _STAGES[min(_STAGES.index(stage) + 1, len(_STAGES) - 1)]


def _require_sizes(client: int, given: Mapping[int, bytes], num_bytes: int) -> None:
    """Raises SecureError for what would have others end the round."""
    if any(len(each) != num_bytes for each in given.values()):
        raise SecureError(f"client {client} has sent shares that are not of {num_bytes} bytes")
