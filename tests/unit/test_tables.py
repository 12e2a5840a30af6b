"""Tables of rows: hashing, rows' optimizers beside torch's, shards, and both ends of the protocol."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import NotWritten, UsageError
from paceline.messages import Kind, Message, WireError
from paceline.nn import ShardedEmbedding
from paceline.row_file import RowFile
from paceline.server.shard import Applied
from paceline.server.tables.client_core import TableClient
from paceline.server.tables.dividing import divided, joined
from paceline.server.tables.hashing import mixed, normal, owners
from paceline.server.tables.row_optimizers import FTRL, RowWiseAdagrad, of_text
from paceline.server.tables.shards import TableShards
from paceline.server.tables.slots import Slots
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.server.tables.storage import Column, InMemory
from paceline.server.tables.table import Table

NUM_ROWS, DIM = 12, 3
KEYS = st.integers(0, 2**63 - 1)
TWINS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd:lr=0.1": partial(torch.optim.SGD, lr=0.1),
    "adagrad:lr=0.1:initial=0.5": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "adam:lr=0.05:beta1=0.8": partial(torch.optim.SparseAdam, lr=0.05, betas=(0.8, 0.999)),
}
BATCHES = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=8), min_size=1, max_size=6)


def spec_of(optimizer: str = "adagrad:lr=0.1", **settings: Any) -> TableSpec:
    given = {"num_rows": NUM_ROWS, "dim": DIM, "seed": 4, "dtype": torch.float64, **settings}
    return TableSpec(name="users", optimizer=of_text(optimizer), **given)


def gradients_of(keys: Sequence[int], seed: int) -> RowGradients:
    """One for each key, however often it comes."""
    unique = torch.tensor(sorted(set(keys)), dtype=torch.int64)
    values = torch.randn(len(unique), DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return RowGradients(unique, values)


# --- hashing -------------------------------------------------------------------------------------------------------


@given(key=KEYS)
def test_keys_are_mixed_as_splitmix64_does(key: int) -> None:
    most = 2**64 - 1
    z = (key + 0x9E3779B97F4A7C15) & most
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & most
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & most
    z ^= z >> 31
    assert int(mixed(torch.tensor([key]))) & most == z
    for servers in (1, 3, 200):
        assert int(owners(torch.tensor([key]), servers)) == (z >> 32) * servers >> 32


def test_servers_own_about_as_many_keys() -> None:
    counts = owners(torch.arange(30_000), 3).bincount()
    assert counts.max() < 1.03 * counts.min()


def test_first_values_are_normal_and_differ() -> None:
    draws = normal(torch.arange(10_000), seed=9, num=4)
    assert abs(float(draws.mean())) < 0.02
    assert float(draws.var()) == pytest.approx(1.0, rel=0.03)
    assert torch.corrcoef(draws.T).fill_diagonal_(0).abs().max() < 0.04
    assert len(draws[:, 0].unique()) == len(draws)
    assert (normal(torch.arange(10_000), seed=10, num=1)[:, 0] - draws[:, 0]).abs().min() > 0
    torch.testing.assert_close(normal(torch.tensor([77]), seed=9, num=4)[0], draws[77], rtol=0, atol=0)


# --- optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", TWINS)
@settings(max_examples=10, deadline=None)
@given(batches=BATCHES, num_servers=st.integers(1, 4))
def test_rows_are_updated_as_a_sparse_embedding(optimizer: str, batches: list[list[int]], num_servers: int) -> None:
    weight = Table(spec_of(optimizer)).read(torch.arange(NUM_ROWS)).requires_grad_()
    twin = TWINS[optimizer]([weight])
    net = Net(spec_of(optimizer), num_servers=num_servers)
    for number, keys in enumerate(batches):
        found = gradients_of(keys, number)
        weight.grad = torch.sparse_coo_tensor(
            found.keys[None], found.values, weight.shape, check_invariants=True
        ).coalesce()
        twin.step()
        net.update({0: (1.0, found)})
    torch.testing.assert_close(net.read(range(NUM_ROWS)), weight.detach())


@settings(max_examples=10, deadline=None)
@given(batches=BATCHES, l1=st.sampled_from([0.0, 0.4]))
def test_ftrl_follows_its_paper(batches: list[list[int]], l1: float) -> None:
    """McMahan et al. 2013, algorithm 1, one number after the other."""
    table = Table(spec_of(f"ftrl:lr=0.5:beta=2:l1={l1}:l2=0.1", std=0.0))
    z, n, w = ([[0.0] * DIM for _ in range(NUM_ROWS)] for _ in range(3))
    for number, keys in enumerate(batches):
        found = gradients_of(keys, number)
        table.update(found)
        for key, values in zip(found.keys.tolist(), found.values.tolist(), strict=True):
            for i, g in enumerate(values):
                sigma = (math.sqrt(n[key][i] + g * g) - math.sqrt(n[key][i])) / 0.5
                z[key][i] += g - sigma * w[key][i]
                n[key][i] += g * g
                strength = (2 + math.sqrt(n[key][i])) / 0.5 + 0.1
                sign = math.copysign(1.0, z[key][i])
                w[key][i] = 0.0 if abs(z[key][i]) <= l1 else -(z[key][i] - sign * l1) / strength
    torch.testing.assert_close(table.read(torch.arange(NUM_ROWS)), torch.tensor(w, dtype=torch.float64))


def test_row_wise_adagrad_keeps_one_number_a_row() -> None:
    table = Table(spec_of("row-wise-adagrad:lr=0.1", std=0.0))
    found = gradients_of([2, 7], 0)
    for _ in range(2):
        table.update(found)
    square = found.values.square().mean(dim=1, keepdim=True)
    expected = -0.1 * found.values * (1 / square.sqrt() + 1 / (2 * square).sqrt())
    torch.testing.assert_close(table.read(found.keys), expected)
    assert table.state()["sum"].shape == (2, 1)


@pytest.mark.parametrize("text", ["adagrad:lr=-1", "adam:beta1=1", "ftrl:lr=0", "sgd:lr=nan", "nothing"])
def test_settings_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        of_text(text)


def test_optimizers_are_the_same_from_their_text() -> None:
    for optimizer in (FTRL(lr=0.3, l1=1e-5), RowWiseAdagrad(lr=0.1 + 0.2, eps=1e-7)):
        assert of_text(str(optimizer)) == optimizer


# --- tables --------------------------------------------------------------------------------------------------------


def test_rows_take_memory_from_their_first_update_on() -> None:
    table = Table(spec_of(num_rows=2**63))
    keys = torch.tensor([0, 2**63 - 1, 5])
    first = table.read(keys)
    assert len(table) == 0
    table.update(RowGradients(keys[:2], torch.zeros(2, DIM, dtype=torch.float64)))
    assert len(table) == 2
    torch.testing.assert_close(table.read(keys), first, rtol=0, atol=0)


@settings(max_examples=10, deadline=None)
@given(batches=BATCHES, before=st.integers(1, 4), after=st.integers(1, 4))
def test_a_state_goes_to_any_number_of_servers(batches: list[list[int]], before: int, after: int) -> None:
    net, other = (Net(spec_of("adam:lr=0.1", seed=seed), num_servers=num) for seed, num in ((4, before), (5, after)))
    for number, keys in enumerate(batches):
        net.update({0: (1.0, gradients_of(keys, number))})
    other.load(net.state())
    found = gradients_of(list(range(NUM_ROWS)), 99)
    for each in (net, other):
        each.update({0: (1.0, found)})
    torch.testing.assert_close(other.read(range(NUM_ROWS)), net.read(range(NUM_ROWS)), rtol=0, atol=0)
    state = net.state()
    for name, tensor in joined(divided(state, 3)).items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)


@settings(max_examples=8, deadline=None)
@given(batches=BATCHES, before=st.integers(1, 4), after=st.integers(1, 4))
def test_files_of_rows_go_to_any_number_of_servers(batches: list[list[int]], before: int, after: int) -> None:
    """Two rows a file, in this test."""
    net, other = (Net(spec_of("adam:lr=0.1", seed=seed), num_servers=num) for seed, num in ((4, before), (5, after)))
    for number, keys in enumerate(batches):
        net.update({0: (1.0, gradients_of(keys, number))})
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.server.tables.table._SAVED_BYTES", 2 * 3 * DIM * 8)
        directory = Path(place, "rows-7-0123abcd")
        files = net.save(directory)
        assert len(files) >= len({key for keys in batches for key in keys}) / 2
        assert {file.name for file in files} == {path.name for path in directory.iterdir()}
        other.load_files(directory, files)
    state = net.state()
    for name, tensor in other.state().items():
        assert torch.equal(tensor, state[name])


def test_a_file_of_rows_that_is_damaged_or_gone_is_named(tmp_path: Path) -> None:
    net = Net(spec_of(), num_servers=2)
    net.update({0: (1.0, gradients_of([1, 2, 3, 4], 0))})
    files = net.save(tmp_path / "rows-1-00000000")
    damaged = tmp_path / "rows-1-00000000" / files[1].name
    content = bytearray(damaged.read_bytes())
    for change in (content[:-1], content[:40] + bytes([content[40] ^ 1]) + content[41:], None):
        damaged.unlink() if change is None else damaged.write_bytes(change)
        with pytest.raises(WireError, match=f"{damaged}"):
            net.load_files(damaged.parent, files)
    assert len(net.state()["keys"]) == 4


@pytest.mark.parametrize("name", ["rows", "rows-1-00000000/../../x", "rows-1-0000000g"])
def test_rows_go_to_no_other_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(WireError, match="rows are not written to"):
        Net(spec_of(), num_servers=1).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_a_server_does_not_see_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotWritten, match=f"server 0: its host has no such directory in {tmp_path}/none"):
        Net(spec_of(), num_servers=1).save(tmp_path / "none" / "rows-1-00000000")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda state: state.pop("sum"), "has no 'sum'"),
        (lambda state: state.update(more=state["sum"]), "it has 'more'"),
        (lambda state: state.update(rows=state["rows"].float()), "its 'rows' are torch.float32"),
        (lambda state: state.update(rows=state["rows"][:, :2]), r"'rows' are torch.float64 of shape \(2, 2\)"),
        (lambda state: state["keys"].fill_(NUM_ROWS), f"none of key {NUM_ROWS}"),
        (lambda state: state["keys"].fill_(1), "a key comes twice"),
    ],
)
def test_a_state_of_another_table_is_refused(change: Callable[[dict[str, Tensor]], object], error: str) -> None:
    table = Table(spec_of())
    table.update(gradients_of([1, 2], 0))
    state = table.state()
    change(state)
    with pytest.raises(UsageError, match=f"table .users.*{error}"):
        table.load(state)
    assert table.state()["keys"].tolist() == [1, 2]


def test_a_state_with_keys_of_32_bits_fits() -> None:
    table, other = Table(spec_of()), Table(spec_of())
    table.update(gradients_of([1, 2], 0))
    other.load({**table.state(), "keys": table.state()["keys"].int()})
    assert torch.equal(other.read(torch.arange(4)), table.read(torch.arange(4)))


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        ([NUM_ROWS], torch.zeros(1, DIM), f"table 'users' has rows 0 to 11, and none of key {NUM_ROWS}"),
        ([-3], torch.zeros(1, DIM), "none of key -3"),
        ([4, 4], torch.zeros(2, DIM), "table 'users': a key comes twice"),
        ([4, 5], torch.tensor([[0.0] * DIM, [math.nan] * DIM]), "table 'users': the gradient of key 5 is not finite"),
        ([4], torch.zeros(1, DIM + 1), r"of shape \(1, 4\)"),
        ([4], torch.zeros(1, DIM, dtype=torch.float32), "not torch.float32"),
    ],
)
def test_an_update_that_cannot_be_is_refused(keys: list[int], values: Tensor, error: str) -> None:
    table = Table(spec_of())
    values = values.double() if "float32" not in error else values
    with pytest.raises(UsageError, match=error):
        table.require(RowGradients(torch.tensor(keys), values))


@settings(max_examples=20, deadline=None)
@given(batches=st.lists(st.sets(st.one_of(KEYS, st.integers(0, 3000)), max_size=300), max_size=6))
def test_keys_have_the_slots_of_their_order(batches: list[set[int]]) -> None:
    slots, known = Slots(), dict[int, int]()
    for batch in batches:
        keys = torch.tensor(sorted(batch), dtype=torch.int64)
        assert slots.find(keys).tolist() == [known.get(key, -1) for key in keys.tolist()]
        new = [key for key in keys.tolist() if key not in known]
        known |= {key: slot for slot, key in enumerate(new, len(known))}
        assert slots.add(torch.tensor(new, dtype=torch.int64)).tolist() == [known[key] for key in new]
        assert slots.find(torch.tensor(list(known), dtype=torch.int64)).tolist() == list(range(len(slots)))


def test_rows_are_read_by_the_keys_that_were_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on this host can change its memory meanwhile."""
    memory, checked = torch.tensor([3, 4]), TableSpec.checked

    def and_then_changed(spec: TableSpec, keys: Tensor) -> Tensor:
        found = checked(spec, keys)
        memory.fill_(-1)
        return found

    shards = TableShards()
    shards.receive(Message(Kind.OPEN_TABLES, 1, 0, body={"tables": [spec_of().plain()]}))
    wanted = Table(spec_of()).read(memory.clone())
    monkeypatch.setattr(TableSpec, "checked", and_then_changed)
    asked = Message(Kind.READ_ROWS, 1, 0, body={"table": 0, "count": 2}, payload=[memoryview(memory.numpy()).cast("B")])
    [rows] = shards.receive(asked)["payload"]
    assert bytes(rows) == wanted.numpy().tobytes()


def test_an_index_that_finds_no_room_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = InMemory()
    slots, made, num_made = Slots(storage), storage.column, [0]
    keys = torch.arange(200)
    slots.add(keys[:100])

    def one(num: int, width: int, dtype: torch.dtype, *, is_seen: bool) -> Column:
        """The second one finds none."""
        num_made[0] += 1
        if num_made[0] > 1:
            raise UsageError("no room")
        return made(num, width, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "column", one)
        with pytest.raises(UsageError, match="no room"):
            slots.add(torch.arange(100, 10_000))
    assert len(slots) == 100
    assert torch.equal(slots.find(keys), torch.where(keys < 100, keys, -1))


def test_columns_in_memory_take_what_a_load_needs() -> None:
    column = InMemory().column(64, 2, torch.float32)
    for num, wanted in ((1000, 1000), (1001, 2000)):
        column.reserve(num)
        assert len(column.values) == wanted


def test_full_buckets_go_on_in_the_next_ones() -> None:
    """Also behind the last bucket, where the first one follows."""
    keys = torch.arange(200_000)
    last = keys[mixed(keys) & 63 == 63][:20]  # Slots begins with 64 buckets
    slots = Slots()
    slots.add(last[:10])
    slots.add(last[10:])
    assert slots.find(last).tolist() == list(range(20))
    assert slots.find(keys[mixed(keys) & 63 == 63][20:30]).tolist() == [-1] * 10


@pytest.mark.parametrize("field", [{"num_rows": 0}, {"num_rows": 2**63 + 1}, {"dim": 0}, {"dim": 2.0}, {"std": -1.0}])
def test_a_table_out_of_range_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"table 'users': {next(iter(field))}"):
        spec_of(**field)


# --- both ends of the protocol -------------------------------------------------------------------------------------


class Net:
    """Workers and servers of one table. Messages are encoded and decoded."""

    def __init__(self, spec: TableSpec, *, num_servers: int, num_workers: int = 1) -> None:
        self.servers = [TableShards() for _ in range(num_servers)]
        self.clients = [TableClient([spec], rank=rank, epoch=1, num_servers=num_servers) for rank in range(num_workers)]
        self.num_updates = 0
        self.ask(0, self.clients[0].open())

    def read(self, keys: Sequence[int], worker: int = 0) -> Tensor:
        self.ask(worker, self.clients[worker].read(0, torch.tensor(list(keys))))
        return self.clients[worker].rows()

    def push(self, worker: int, weight: float, gradients: RowGradients | None) -> None:
        self.ask(worker, self.clients[worker].push([gradients], weight=weight))

    def update(self, contributions: dict[int, tuple[float, RowGradients | None]]) -> None:
        """One update of what these workers push."""
        for worker, (weight, gradients) in contributions.items():
            self.push(worker, weight, gradients)
        self.num_updates += 1
        for server in self.servers:
            server.update([Applied(self.num_updates, worker, 0, 0) for worker in contributions])

    def state(self) -> dict[str, Tensor]:
        self.ask(0, self.clients[0].get_state(0))
        return self.clients[0].state()

    def load(self, state: dict[str, Tensor]) -> None:
        self.ask(0, self.clients[0].set_state(0, state))

    def save(self, directory: Path) -> list[RowFile]:
        self.ask(0, self.clients[0].save(0, directory))
        return self.clients[0].saved()

    def load_files(self, directory: Path, files: list[RowFile]) -> None:
        self.ask(0, self.clients[0].load(0, directory, files))

    def ask(self, worker: int, sends: Any) -> None:
        client = self.clients[worker]
        for server, message in sends:
            request = Message.decode([bytes(frame) for frame in message.encode()], epoch=1)
            assert request.tensor_bytes == sum(map(len, request.payload))
            try:
                answer = Message(Kind.OK, 1, **self.servers[server].receive(request))
            except WireError as error:
                answer = Message(Kind.ERROR, 1, body={"error": str(error)})
            assert not list(client.receive(server, answer))
        assert client.is_done
        client.require_done()


@settings(max_examples=10, deadline=None)
@given(
    keys=st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=6), min_size=3, max_size=3),
    weights=st.lists(st.floats(0.1, 3.0), min_size=3, max_size=3),
    num_servers=st.integers(1, 3),
)
def test_an_update_is_the_weighted_mean_of_all_workers(
    keys: list[list[int]], weights: list[float], num_servers: int
) -> None:
    net = Net(spec_of("sgd:lr=1", std=0.0), num_servers=num_servers, num_workers=3)
    found = [gradients_of(each, worker) for worker, each in enumerate(keys)]
    net.update({worker: (weights[worker], found[worker] if keys[worker] else None) for worker in range(3)})
    expected = torch.zeros(NUM_ROWS, DIM, dtype=torch.float64)
    for weight, (own, values) in zip(weights, found, strict=True):
        expected[own] -= weight / sum(weights) * values
    torch.testing.assert_close(net.read(range(NUM_ROWS), worker=2), expected)


def test_a_push_that_was_for_no_update_counts_nowhere() -> None:
    net = Net(spec_of("sgd:lr=1", std=0.0), num_servers=2, num_workers=2)
    net.push(1, 1.0, gradients_of([3], 0))
    net.update({0: (1.0, None)})
    net.update({1: (1.0, gradients_of([4], 1))})
    assert net.read([3]).count_nonzero() == 0
    torch.testing.assert_close(net.read([4]), -gradients_of([4], 1).values)


def test_only_servers_that_own_a_key_are_asked() -> None:
    net = Net(spec_of(), num_servers=200)
    assert len(net.clients[0].read(0, torch.arange(3))) == len(owners(torch.arange(3), 200).unique())


def request(kind: Kind, body: object, *tensors: Tensor) -> Message:
    payload = [tensor.numpy().tobytes() for tensor in tensors]
    return Message(kind, 1, sender=0, body=json.loads(json.dumps(body)), payload=payload)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (request(Kind.READ_ROWS, {"table": 1, "count": 0}), "there are 1 tables, and none of index 1"),
        (request(Kind.READ_ROWS, {"table": "0", "count": 0}), "none of index '0'"),
        (request(Kind.READ_ROWS, {"table": 0, "count": 2**60}), "1152921504606846976 keys in 0 bytes"),
        (request(Kind.READ_ROWS, {"table": 0, "count": 1}, torch.tensor([1, 2])), "16 bytes of tensors instead of 8"),
        (request(Kind.READ_ROWS, {"table": 0, "count": 1}, torch.tensor([NUM_ROWS])), f"none of key {NUM_ROWS}"),
        (request(Kind.READ_ROWS, {}), "count"),
        (request(Kind.PUSH_ROWS, {"weight": 0, "counts": [None]}), "weight 0"),
        (request(Kind.PUSH_ROWS, {"weight": True, "counts": [None]}), "weight True"),
        (request(Kind.PUSH_ROWS, {"weight": 1, "counts": []}), "rows of 0 tables"),
        (request(Kind.PUSH_ROWS, {"weight": 1, "counts": 3}), "PUSH_ROWS"),
        (request(Kind.PUSH_ROWS, {"weight": 1, "counts": [-1]}), "-1 keys"),
        (
            request(
                Kind.PUSH_ROWS,
                {"weight": 1, "counts": [1]},
                torch.tensor([2]),
                torch.full((DIM,), math.inf, dtype=torch.float64),
            ),
            "table 'users': the gradient of key 2 is not finite",
        ),
        (request(Kind.OPEN_TABLES, {"tables": [{"name": "a"}]}), "no description of a table"),
        (request(Kind.OPEN_TABLES, {"tables": 3}), "OPEN_TABLES"),
        (request(Kind.GET_ROWS, {"table": None}), "none of index None"),
        (request(Kind.SET_ROWS, {"table": 0, "tensors": [["0.keys", "torch.int64", [2**60]]]}), "cannot be read|bytes"),
    ],
)
def test_messages_that_make_no_sense_are_refused(message: Message, error: str) -> None:
    net = Net(spec_of(), num_servers=1)
    with pytest.raises(WireError, match=error):
        net.servers[0].receive(message)
    assert not net.servers[0].is_empty


# --- the layer in one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [[5], [4, 9, 0], [4, 9, 4, 0], [[1, 2], [2, 3]], [[7, 1], [3, 2]], []])
def test_gradients_are_as_of_a_sparse_embedding(keys: list[Any]) -> None:
    """Whether a key comes twice or not; what the layer gives may be changed in place."""
    table = ShardedEmbedding(NUM_ROWS, DIM, optimizer="sgd:lr=1")
    twin = torch.nn.Embedding(NUM_ROWS, DIM, sparse=True, _weight=table(torch.arange(NUM_ROWS)).detach())
    indices = torch.tensor(keys, dtype=torch.int64)
    for layer in (table, twin):
        for factor in (1.0, -2.0):
            (layer(indices).mul_(factor) ** 2 * factor).sum().backward()
    assert twin.weight.grad is not None
    expected = twin.weight.detach() - twin.weight.grad.to_dense()
    table.update()
    torch.testing.assert_close(table(torch.arange(NUM_ROWS)), expected)


@settings(max_examples=10, deadline=None)
@given(
    bags=st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=4), min_size=1, max_size=5),
    mode=st.sampled_from(["sum", "mean"]),
)
def test_bags_are_as_of_an_embedding_bag(bags: list[list[int]], mode: Any) -> None:
    table = ShardedEmbedding(NUM_ROWS, DIM, optimizer="sgd:lr=0.5", dtype=torch.float64)
    twin = torch.nn.EmbeddingBag(NUM_ROWS, DIM, mode=mode, _weight=table(torch.arange(NUM_ROWS)).detach(), sparse=True)
    keys = torch.tensor([key for bag in bags for key in bag], dtype=torch.int64)
    offsets = torch.tensor([sum(map(len, bags[:index])) for index in range(len(bags))])
    found = table.bag(keys, offsets, mode)
    torch.testing.assert_close(found, twin(keys, offsets))
    for each in (found, twin(keys, offsets)):
        each.square().sum().backward()
    table.update()
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    torch.testing.assert_close(table(torch.arange(NUM_ROWS)).detach(), twin.weight.detach())


def test_keys_may_be_changed_after_their_rows_were_read() -> None:
    table = ShardedEmbedding(NUM_ROWS, DIM, optimizer="sgd:lr=1", std=0.0)
    keys = torch.tensor([1, 2])
    rows = table(keys)
    keys.fill_(7)
    rows.sum().backward()
    table.update()
    assert table(torch.tensor([1, 2, 7])).detach()[:, 0].tolist() == [-1, -1, 0]


def test_several_uses_of_a_table_add_up() -> None:
    table = ShardedEmbedding(NUM_ROWS, DIM, optimizer="sgd:lr=1", std=0.0)
    for keys in ([1, 1, 2], [2, 3]):
        table(torch.tensor(keys)).sum().backward()
    table.update()
    table.update()  # there is nothing left
    assert table(torch.arange(5)).detach()[:, 0].tolist() == [0, -2, -2, -1, 0]


def test_keys_of_any_shape() -> None:
    table = ShardedEmbedding(NUM_ROWS, DIM, optimizer="sgd")
    for shape in ((), (0,), (2, 3), (2, 1, 4)):
        keys = torch.randint(0, NUM_ROWS, shape, dtype=torch.int32)
        assert table(keys).shape == (*shape, DIM)
    with pytest.raises(UsageError, match=r"keys are whole numbers, and these are torch.float32: \[0.0, 1.0, 2.0\] and"):
        table(torch.arange(4.0))
    with pytest.raises(UsageError, match=r"torch\.bool"):
        table(torch.tensor([True]))


def test_a_scaled_loss_is_refused() -> None:
    table = ShardedEmbedding(NUM_ROWS, DIM, optimizer="sgd", name="users")
    with torch.autocast("cpu", torch.float16), pytest.raises(UsageError, match=r"table 'users'.*use bfloat16"):
        table(torch.tensor([1]))
