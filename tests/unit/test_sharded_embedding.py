"""The layer whose rows lie in tables, in one process, beside torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.nn import ShardedEmbedding
from tests.unit.one_table import DIM, NUM_ROWS


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


@pytest.mark.parametrize("num_rows", [NUM_ROWS, 2**63])
def test_an_unsigned_key_is_named_as_it_was_given(num_rows: int) -> None:
    table = ShardedEmbedding(num_rows, DIM, optimizer="sgd", name="users")
    with pytest.raises(UsageError, match=f"table 'users' has rows 0 to {num_rows - 1}, and none of key {2**63 + 5}"):
        table(torch.tensor([1, 2**63 + 5], dtype=torch.uint64))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"optimizer": None}, "table 'users': its optimizer must be one of paceline.nn.*not None"),
        ({"optimizer": torch.optim.SGD}, "not <class 'torch.optim.sgd.SGD'>"),
        ({"name": ""}, "a table's name must be some text, not ''"),
        ({"name": 3}, "a table's name must be some text, not 3"),
    ],
)
def test_what_describes_no_table_is_refused(settings: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        ShardedEmbedding(NUM_ROWS, DIM, **{"optimizer": "sgd", "name": "users", **settings})


def test_a_learning_rate_may_change_where_the_optimizer_allows_it() -> None:
    table = ShardedEmbedding(NUM_ROWS, DIM, optimizer="sgd:lr=0.5", name="users")
    before = table(torch.arange(2)).detach()
    for lr in (table.lr, 0.25, 0):
        table.lr = lr
        table(torch.tensor([1])).sum().backward()
        table.update()
    assert torch.allclose(table(torch.arange(2)), before - torch.tensor([[0.0], [0.75]]))
    wrong: Any
    for wrong, error in ((-1.0, "lr must be a number of at least 0"), (torch.tensor(1.0), "lr must be a number, not")):
        with pytest.raises(UsageError, match=f"table 'users': {error}"):
            table.lr = wrong
    with pytest.raises(UsageError, match="keeps of a row is of its own lr"):
        ShardedEmbedding(NUM_ROWS, DIM, optimizer="ftrl").lr = 0.2


def test_a_scaled_loss_is_refused() -> None:
    table = ShardedEmbedding(NUM_ROWS, DIM, optimizer="sgd", name="users")
    with torch.autocast("cpu", torch.float16), pytest.raises(UsageError, match=r"table 'users'.*use bfloat16"):
        table(torch.tensor([1]))


def test_gradients_of_rows_stay_when_a_parameters_in_the_same_memory_is_changed() -> None:
    """A sum hands one tensor on to both of its terms, and a view of it becomes the parameter's `grad`."""
    table, bias = ShardedEmbedding(5, 2, optimizer="sgd"), torch.nn.Parameter(torch.zeros(6))
    added = table(torch.arange(3)) + bias.view(3, 2)
    (added * torch.tensor([[1.0, 2.0]])).sum().backward()
    assert bias.grad is not None
    bias.grad.zero_()
    gradients = table.take_gradients()
    assert gradients is not None
    assert gradients.values.tolist() == [[1.0, 2.0]] * 3
