"""Data divided among clients, and clients drawn for rounds."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from paceline.errors import UsageError
from paceline.partition import IID, ByColumn, Dirichlet, Exponential, FromFile, Linear, Partition, Quantity, Replicated
from paceline.partition import Shards as InShards
from paceline.roster import BySize, Cyclic, Participation, Poisson, Roster, Sampler, Turn, Uniform, num_drawn
from paceline.training.sharding import Place, ShardedLoader
from paceline.training.sharding.clients import column_of

NUM_SAMPLES, NUM_LABELS = 1200, 10
LABELS = torch.arange(NUM_SAMPLES).remainder(NUM_LABELS)


def column(name: str) -> Any:
    return LABELS if name == "label" else [f"writer {index % 7}" for index in range(NUM_SAMPLES)]


def divided(partition: Partition, num_clients: int = 20, *, seed: int = 0) -> list[list[int]]:
    found = partition.divide(NUM_SAMPLES, num_clients, column=column, seed=seed)
    return [samples.tolist() for samples in found]


DRAWN = (IID(), InShards(), Dirichlet(), Quantity(), Linear(), Exponential())


@pytest.mark.parametrize("partition", DRAWN, ids=str)
def test_every_sample_has_one_client_and_every_client_a_sample(partition: Partition) -> None:
    found = divided(partition)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(NUM_SAMPLES))
    assert min(map(len, found)) >= 1
    assert found == divided(partition)
    assert found != divided(partition, seed=1)


def test_sizes_are_as_they_are_called() -> None:
    assert {len(own) for own in divided(IID())} == {60}
    assert {len(own) for own in divided(InShards())} == {60}
    linear = [len(own) for own in divided(Linear(), 3)]
    assert linear == [200, 400, 600]
    exponential = [len(own) for own in divided(Exponential(ratio=100), 3)]
    assert exponential == pytest.approx([1200 / 111, 12000 / 111, 120000 / 111], abs=1.5)
    assert all(own == list(range(NUM_SAMPLES)) for own in divided(Replicated(), 3))


def test_shards_are_of_few_labels() -> None:
    """1200 samples of ten labels in 40 shards of 30: a label fills four, so that no shard has two labels."""
    labels = [set(LABELS[own].tolist()) for own in divided(InShards(per_client=2))]
    assert max(map(len, labels)) == 2
    assert set.union(*labels) == set(range(NUM_LABELS))


@pytest.mark.parametrize(("alpha", "is_even"), [(0.1, False), (1000.0, True)])
def test_dirichlet_tells_labels_apart_by_alpha(alpha: float, is_even: bool) -> None:
    shares = []
    for own in divided(Dirichlet(alpha=alpha), 10):
        counts = Counter(LABELS[own].tolist())
        shares.append(counts.most_common(1)[0][1] / len(own))
    assert (max(shares) < 0.2) == is_even
    assert (sum(shares) / len(shares) > 0.35) == (not is_even)


def test_clients_by_a_column_or_from_a_file(tmp_path: Path) -> None:
    by_column = divided(ByColumn("writer"), 7)
    assert by_column == [list(range(writer, NUM_SAMPLES, 7)) for writer in range(7)]
    path = tmp_path / "clients.txt"
    path.write_text("\n".join(column("writer")).replace(" ", "-"))
    assert divided(FromFile(str(path)), 7) == by_column


@pytest.mark.parametrize(
    ("partition", "num_clients", "message"),
    [
        (IID(), NUM_SAMPLES + 1, "cannot be divided into 1201 parts; use fewer clients"),
        (ByColumn("writer"), 20, "tells 7 clients apart; use --option clients=7"),
        (FromFile("nowhere.txt"), 20, "cannot read partition.path=nowhere.txt"),
        (Dirichlet(alpha=0.01, least=100), 10, "draws left some of 10 clients with fewer than 100 samples"),
    ],
)
def test_what_cannot_be_divided(partition: Partition, num_clients: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        divided(partition, num_clients)


@given(num_samples=st.integers(1, 300), num_clients=st.integers(1, 40), partition=st.sampled_from((IID(), Linear())))
def test_any_number_of_samples(num_samples: int, num_clients: int, partition: Partition) -> None:
    if num_samples < num_clients:
        with pytest.raises(UsageError):
            partition.divide(num_samples, num_clients, column=column, seed=0)
        return
    found = partition.divide(num_samples, num_clients, column=column, seed=0)
    assert len(found) == num_clients
    assert sorted(torch.cat(found).tolist()) == list(range(num_samples))


# --- who takes part ---------------------------------------------------------------------------------------------------

SIZES = tuple(range(1, 31))


def rosters(sampler: Sampler, size: int, *, is_settled: bool = False, fraction: float = 0.2) -> list[Roster]:
    participation = Participation(
        num_clients=30, fraction=fraction, partition=IID(), sampler=sampler, epochs=1, is_settled=is_settled
    )
    ranks = range(size)
    return [Roster(participation, sizes=SIZES, num_batches=SIZES, rank=rank, ranks=ranks, seed=3) for rank in ranks]


@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("sampler", [Uniform(), BySize(), Poisson(), Cyclic()], ids=str)
def test_all_workers_together_play_a_round_once(sampler: Sampler, is_settled: bool) -> None:
    (alone,) = rosters(sampler, 1, is_settled=is_settled)
    several = rosters(sampler, 4, is_settled=is_settled)
    for number in range(20):
        turns = [turn for roster in several for turn in roster.of_round(number)]
        assert sorted(turns) == sorted(alone.of_round(number))
        assert all(turn.num_samples == SIZES[turn.client] for turn in turns)
    if is_settled:
        players = {(turn.client, r) for r, own in enumerate(several) for n in range(20) for turn in own.of_round(n)}
        assert len(players) == len({client for client, _ in players})
    flat = [turn for number in range(20) for turn in several[1].of_round(number)]
    assert [several[1].turn(number) for number in range(len(flat))] == flat


def test_workers_have_about_as_much_to_do() -> None:
    several = rosters(Uniform(), 3, fraction=0.5)
    for number in range(20):
        loads = [sum(turn.num_batches for turn in roster.of_round(number)) for roster in several]
        assert max(loads) - min(loads) <= max(SIZES)


def drawn_by(sampler: Sampler, number: int, fraction: float = 0.2) -> list[int]:
    return sampler.draw(number, sizes=SIZES, fraction=fraction, seed=3)


def test_samplers_draw_what_they_say() -> None:
    assert all(len(set(drawn_by(Uniform(), number))) == 6 for number in range(20))
    assert drawn_by(Uniform(), 0) != drawn_by(Uniform(), 1)
    counts = Counter(client for number in range(500) for client in drawn_by(BySize(), number))
    assert counts[29] / counts[9] == pytest.approx(3, rel=0.25)
    sizes = [len(drawn_by(Poisson(), number)) for number in range(500)]
    assert len(set(sizes)) > 5
    assert sum(sizes) / len(sizes) == pytest.approx(6, rel=0.1)
    cycle = [client for number in range(5) for client in drawn_by(Cyclic(), number)]
    assert sorted(cycle) == list(range(30))
    assert cycle != [client for number in range(5, 10) for client in drawn_by(Cyclic(), number)]
    assert num_drawn(0.001, 30) == 1


def test_one_that_is_drawn_twice_plays_once_and_counts_twice() -> None:
    (alone,) = rosters(BySize(), 1, fraction=1.0)
    turns = alone.of_round(0)
    assert sum(turn.times for turn in turns) == 30
    assert len({turn.client for turn in turns}) == len(turns) < 30


# --- batches ----------------------------------------------------------------------------------------------------------


def loaded(loader: DataLoader[Any], **settings: Any) -> ShardedLoader:
    options = {"num_clients": 4, "fraction": 1.0, "partition": IID(), "sampler": Cyclic(), "epochs": 1}
    participation = Participation(**{**options, "is_settled": False, **settings})
    return ShardedLoader(loader, rank=0, size=1, seed=0, participation=participation)


DATA = TensorDataset(torch.arange(26.0), torch.arange(26) % 2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pass_is_over_one_clients_samples(num_workers: int) -> None:
    loader = loaded(DataLoader(DATA, batch_size=3, shuffle=True, num_workers=num_workers), epochs=2)
    seen: list[list[int]] = []
    for _ in range(4):
        batches = [x.tolist() for x, _ in loader]
        assert len(batches) == len(loader)
        seen.append([int(sample) for batch in batches for sample in batch])
        half = len(seen[-1]) // 2
        assert sorted(seen[-1][:half]) == sorted(seen[-1][half:])
        assert seen[-1][:half] != seen[-1][half:]
    assert sorted(itertools.chain(*seen)) == sorted(2 * list(range(26)))


def test_a_pass_goes_on_within_a_turn() -> None:
    whole, resumed = (loaded(DataLoader(DATA, batch_size=3, shuffle=True)) for _ in range(2))
    wanted = [[x.tolist() for x, _ in whole] for _ in range(3)]
    resumed.resume_at(Place(2, 1), whole.identity)
    assert [[x.tolist() for x, _ in resumed] for _ in range(3)] == [[], [], wanted[2][1:]]


class Unlabelled(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1)


class Targeted(Unlabelled):
    targets = (3, 1, 2, 0, 3, 1, 2, 0)
    writer = tuple("abababab")


def test_labels_are_found_wherever_data_sets_keep_them() -> None:
    assert column_of(Targeted(), "label") == Targeted.targets
    assert column_of(Subset(Targeted(), [5, 0]), "writer") == ["b", "a"]
    assert torch.equal(torch.as_tensor(column_of(DATA, "label")), DATA.tensors[1])
    pairs: Any = [(torch.zeros(1), label) for label in (1, 0)]
    assert list(column_of(pairs, "label")) == [1, 0]


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (lambda: DataLoader(DATA, batch_size=3, sampler=WeightedRandomSampler([1.0] * 26, 26)), {}, "has no meaning"),
        (
            lambda: DataLoader(DATA, batch_size=9, drop_last=True),
            {},
            r"client \d has \d samples, of which no batch",
        ),
        (lambda: DataLoader(Unlabelled(), batch_size=2), {"partition": InShards()}, "nothing tells the labels"),
        (lambda: DataLoader(DATA, batch_size=2), {"partition": ByColumn("site")}, "no attribute 'site'"),
    ],
)
def test_data_that_clients_cannot_have(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loaded(make(), **settings)


def test_a_turn_says_whose_it_is() -> None:
    (alone,) = rosters(Cyclic(), 1)
    assert isinstance(alone.turn(7), Turn)
    assert alone.turn(7).round == 1
