"""Secure aggregation: sums that are exact whoever drops out, and a server that sees nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography")

from paceline.secure import Client, PublicKeys, Quantiser, Revealed, SecureError, Server, neighbours
from paceline.secure.secrets import joined, mask, split

NUM_CLIENTS, THRESHOLD, WORDS = 20, 11, 50
STAGES = ("keys", "shares", "vectors", "unmasking")
QUANTISER = Quantiser(clip=4.0, num_clients=NUM_CLIENTS)


def vectors(num: int = NUM_CLIENTS, words: int = WORDS) -> list[Any]:
    drawn = torch.randn(num, words, generator=torch.Generator().manual_seed(1))
    return [QUANTISER.encode(row) for row in drawn]


class Round:
    """All ends in one process.

    Args:
        gone: who sends nothing from a stage on.
        seen: is given everything that the server is sent.
    """

    def __init__(
        self,
        given: list[Any],
        *,
        gone: dict[str, Collection[int]] | None = None,
        threshold: int = THRESHOLD,
        degree: int | None = None,
        seen: Callable[[Any], object] = lambda message: None,
    ) -> None:
        size = len(given)
        self.graph = neighbours(range(size), degree=degree or size - 1, seed=0)
        self.given, self.gone, self.seen = given, gone or {}, seen
        self.clients = {
            u: Client(u, neighbours=near, threshold=threshold, label="round 1") for u, near in self.graph.items()
        }
        self.server = Server(self.graph, threshold=threshold, num_elements=len(given[0]))

    def left(self, stage: str, among: Collection[int]) -> list[int]:
        lost = {u for each in STAGES[: STAGES.index(stage) + 1] for u in self.gone.get(each, ())}
        return [u for u in among if u not in lost]

    def sent(self, message: Any) -> Any:
        self.seen(message)
        return message

    def up_to_vectors(self) -> dict[int, list[int]]:
        for u in self.left("keys", self.clients):
            self.server.receive_keys(u, self.sent(self.clients[u].advertise()))
        keys = self.server.keys_for()
        for u in self.left("shares", keys):
            self.server.receive_shares(u, self.sent(self.clients[u].share(keys[u])))
        shares = self.server.shares_for()
        for u in self.left("vectors", shares):
            self.server.receive_vector(u, self.sent(self.clients[u].mask(self.given[u], shares[u])))
        return self.server.arrived_for()

    def total(self) -> Any:
        arrived = self.up_to_vectors()
        for u in self.left("unmasking", arrived):
            self.server.receive_revealed(u, self.sent(self.clients[u].unmask(arrived[u])))
        return self.server.total()


def expected(given: list[Any], arrived: Collection[int]) -> Any:
    return sum((given[u].astype(np.uint64) for u in arrived), np.zeros(WORDS, np.uint64)).astype(np.uint32)


@pytest.mark.parametrize("stage", [*STAGES, "nobody"])
def test_the_sum_is_exact_whoever_drops_out(stage: str) -> None:
    """20 clients, complete graph, threshold 11, 6 of which drop out at one stage."""
    given = vectors()
    lost = (0, 3, 7, 12, 18, 19)
    all_ends = Round(given, gone={stage: lost})
    total = all_ends.total()
    are_in = range(20) if stage in ("unmasking", "nobody") else [u for u in range(20) if u not in lost]
    assert sorted(all_ends.server.arrived) == list(are_in)
    assert np.array_equal(total, expected(given, are_in))


def test_the_sum_is_exact_on_a_sparse_graph_with_losses_at_every_stage() -> None:
    given = vectors(40)
    gone = {"keys": (1,), "shares": (2, 30), "vectors": (3, 17), "unmasking": (4,)}
    all_ends = Round(given, gone=gone, degree=14, threshold=9)
    assert np.array_equal(all_ends.total(), expected(given, set(range(40)) - {1, 2, 30, 3, 17}))
    assert len({len(near) for near in all_ends.graph.values()}) == 1
    assert all(u in all_ends.graph[v] for u, near in all_ends.graph.items() for v in near)


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_there_is_no_sum(stage: str) -> None:
    with pytest.raises(SecureError, match=r"10 clients are left after|goes no further"):
        Round(vectors(), gone={stage: range(10)}).total()


def test_masked_words_are_uniform() -> None:
    """All-zero vectors of 65,536 words: top and bottom bytes in 256 bins, by chi-square at 255 degrees of freedom."""
    found: list[Any] = []
    zeros = [np.zeros(65_536, dtype=np.uint32) for _ in range(12)]
    Round(zeros, threshold=7, seen=lambda sent: isinstance(sent, np.ndarray) and found.append(sent)).up_to_vectors()
    assert len(found) == 12
    for masked in found:
        for byte in (masked >> 24, masked & 255):
            counts = np.bincount(byte, minlength=256)
            assert ((counts - 256.0) ** 2 / 256).sum() < 377


def test_nothing_that_the_server_is_sent_tells_a_vector() -> None:
    """With all that was revealed undone, what remains of a vector is the masks that clients have in common."""
    given, sent = vectors(), []
    all_ends = Round(given, gone={"vectors": (5,)}, seen=sent.append)
    all_ends.total()
    raws = [each.tobytes() for each in given]
    for message in sent:
        content = message.tobytes() if isinstance(message, np.ndarray) else repr(message).encode("latin-1")
        assert all(raw[:16] not in content for raw in raws)
    masked = dict(zip(all_ends.server.arrived, (m for m in sent if isinstance(m, np.ndarray)), strict=True))
    revealed = [m for m in sent if isinstance(m, Revealed)]
    for u, words in masked.items():
        seed = joined({v: each.seeds[u] for v, each in zip(all_ends.server.arrived, revealed, strict=True)})
        assert (words - mask(seed, WORDS) != given[u]).all()
        assert not any(u in each.keys for each in revealed), "and nobody has told of its common masks"


def test_a_client_reveals_one_secret_of_another_once() -> None:
    all_ends = Round(vectors())
    arrived = all_ends.up_to_vectors()
    client = all_ends.clients[0]
    with pytest.raises(SecureError, match="client 0 goes no further: 10 vectors have arrived, and 11 must be"):
        client.unmask(arrived[0][:10])
    with pytest.raises(SecureError, match=r"was given vectors of \[99\], who are no neighbours"):
        client.unmask([*arrived[0], 99])
    revealed = client.unmask(arrived[0][:15])
    assert not revealed.seeds.keys() & revealed.keys.keys()
    with pytest.raises(SecureError, match="asked to reveal shares twice"):
        client.unmask(arrived[0])


def test_a_threshold_that_lets_a_server_ask_for_both_secrets_is_refused() -> None:
    for threshold in (10, 21):
        with pytest.raises(SecureError, match=f"threshold={threshold} must be more than half of 20 share holders"):
            Client(0, neighbours=range(1, 20), threshold=threshold, label="")


def test_false_messages_are_refused_and_change_nothing() -> None:
    given = vectors()
    all_ends = Round(given)
    server = all_ends.server
    server.receive_keys(0, all_ends.clients[0].advertise())
    for client, why in ((0, "has come already"), (99, "is not due")):
        with pytest.raises(SecureError, match=why):
            server.receive_keys(client, all_ends.clients[0].advertise())
    with pytest.raises(SecureError, match="refused vectors from client 0"):
        server.receive_vector(0, given[0])
    own = all_ends.clients[1].advertise()
    for false_keys, why in (
        (all_ends.clients[0].advertise(), "client 1 has sent the keys of another one"),
        (own._replace(masks=bytes(32)), "refused a public key"),
        (own._replace(messages=b"short"), "refused a public key"),
    ):
        with pytest.raises(SecureError, match=why):
            server.receive_keys(1, false_keys)
    for u in range(1, 20):
        server.receive_keys(u, all_ends.clients[u].advertise())
    keys = server.keys_for()
    for u, client in all_ends.clients.items():
        sealed = client.share(keys[u])
        with pytest.raises(SecureError, match="not for its neighbours"):
            server.receive_shares(u, {u: b""})
        with pytest.raises(SecureError, match=f"client {u} has sent shares that are not of 160 bytes"):
            server.receive_shares(u, {other: each[:-1] for other, each in sealed.items()})
        server.receive_shares(u, sealed)
    shares = server.shares_for()
    shares[1][0] = bytes(200)
    with pytest.raises(SecureError, match="client 1 cannot open the shares of client 0"):
        all_ends.clients[1].mask(given[1], shares[1])
    for u in set(range(20)) - {1}:
        masked = all_ends.clients[u].mask(given[u], shares[u])
        for false in (masked[:-1], masked.astype(np.int64), masked[None]):
            with pytest.raises(SecureError, match="words"):
                server.receive_vector(u, false)
        server.receive_vector(u, masked)
    arrived = server.arrived_for()
    for u in arrived:
        with pytest.raises(SecureError, match="shares that it was not asked for"):
            server.receive_revealed(u, Revealed({u: b"x"}, {}))
        revealed = all_ends.clients[u].unmask(arrived[u])
        with pytest.raises(SecureError, match=f"client {u} has sent shares that are not of 66 bytes"):
            server.receive_revealed(u, Revealed(revealed.seeds, dict.fromkeys(revealed.keys, b"")))
        server.receive_revealed(u, revealed)
    assert np.array_equal(server.total(), expected(given, set(range(20)) - {1}))


def test_a_share_that_is_none_ends_the_round_rather_than_giving_a_wrong_sum() -> None:
    all_ends = Round(vectors(), gone={"vectors": (5,)})
    arrived = all_ends.up_to_vectors()
    for u in arrived:
        revealed = all_ends.clients[u].unmask(arrived[u])
        false = {5: bytes(66)} if u == 0 else revealed.keys
        all_ends.server.receive_revealed(u, Revealed(revealed.seeds, false))
    with pytest.raises(SecureError, match=r"shares of client|client 5's key"):
        all_ends.server.total()


def test_keys_that_are_not_different_ones_are_refused() -> None:
    keys = {u: PublicKeys(bytes([u]) * 32, bytes([u]) * 32) for u in range(1, 20)}
    client = Client(0, neighbours=range(1, 20), threshold=11, label="")
    with pytest.raises(SecureError, match="one of them for several clients"):
        client.share({**keys, 2: keys[1]})
    client = Client(0, neighbours=range(1, 20), threshold=11, label="")
    with pytest.raises(SecureError, match="refused a public key"):
        client.share({**keys, 1: PublicKeys(bytes(32), bytes(32))})


@settings(max_examples=20)
@given(secret=st.binary(min_size=32, max_size=32), threshold=st.integers(1, 8), data=st.data())
def test_as_many_shares_as_the_threshold_are_the_secret(secret: bytes, threshold: int, data: st.DataObject) -> None:
    shares = split(secret, list(range(8)), threshold=threshold)
    some = data.draw(st.permutations(range(8)))
    assert joined({holder: shares[holder] for holder in some[:threshold]}) == secret
    if threshold > 1:
        with contextlib.suppress(SecureError):
            assert joined({holder: shares[holder] for holder in some[: threshold - 1]}) != secret


@given(clip=st.floats(0.1, 100), num=st.integers(1, 1000), seed=st.integers(0, 99))
def test_a_sum_of_quantised_vectors_is_off_by_half_a_level_each(clip: float, num: int, seed: int) -> None:
    quantiser = Quantiser(clip, num)
    drawn = torch.randn(min(num, 5), 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * clip
    total = sum((quantiser.encode(row) for row in drawn), np.zeros(20, np.uint32))
    off = quantiser.decode(total, num_summed=len(drawn)) - drawn.clamp(-clip, clip).sum(0)
    assert off.abs().max() <= len(drawn) * quantiser.step * 0.51
    highest = np.full(3, 1, np.uint64) * int(quantiser.encode(torch.tensor([clip]))[0]) * num
    assert (highest < 2**32).all()


def test_a_graph_is_refused_that_cannot_be() -> None:
    for degree in (3, 0, 20):
        with pytest.raises(ValueError, match=f"a degree among 10 clients is even and at least 2, or 9, not {degree}"):
            neighbours(range(10), degree=degree, seed=0)
    with pytest.raises(ValueError, match="NaN"):
        QUANTISER.encode(torch.tensor([torch.nan]))
