"""The pieces of the key-value store beside naive ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.kv import Pairs, SignificantlyModified, kkt
from paceline.kv.key_cache import KeyCache
from paceline.kv.range_clocks import RangeClocks
from paceline.kv.requests import pack_values, unpack_values
from paceline.kv.rows import Rows
from tests.unit.kv_spec import KEYS, NUM_KEYS, tensor


@given(writes=st.lists(KEYS, max_size=8), asked=KEYS)
def test_rows_are_a_dictionary(writes: list[list[int]], asked: list[int]) -> None:
    rows, naive = Rows(2, torch.float64), dict[int, float]()
    for number, keys in enumerate(writes, 1):
        rows.write(tensor(keys), torch.full((len(keys), 2), float(number), dtype=torch.float64))
        naive |= dict.fromkeys(keys, float(number))
    assert rows.read(tensor(asked))[:, 1].tolist() == [naive.get(key, 0.0) for key in asked]
    assert rows.missing(tensor(asked)).tolist() == [key not in naive for key in asked]
    assert rows.between(3, 9).keys.tolist() == sorted(key for key in naive if 3 <= key < 9)


POINTS = st.tuples(st.integers(0, NUM_KEYS), st.integers(0, NUM_KEYS)).map(sorted)


@given(advances=st.lists(st.tuples(POINTS, st.integers(0, 1), st.integers(1, 4)), max_size=12), asked=POINTS)
def test_clocks_by_range_are_clocks_by_key(advances: list[tuple[list[int], int, int]], asked: list[int]) -> None:
    clocks, naive = RangeClocks(0, NUM_KEYS, (0, 1)), [[0, 0] for _ in range(NUM_KEYS)]
    for (start, stop), worker, clock in advances:
        clocks.advance(start, stop, worker, clock)
        for key in range(start, stop):
            naive[key][worker] = max(naive[key][worker], clock)
    found = list(clocks.within(0, NUM_KEYS))
    assert [[each.clocks[0], each.clocks[1]] for each in found for _ in range(each.start, each.stop)] == naive
    assert all(one.clocks != other.clocks for one, other in pairwise(found))  # no more than needed
    covered = [key for each in clocks.within(*asked) for key in range(each.start, each.stop)]
    assert covered == list(range(*asked))
    assert clocks.slowest(*asked, {0, 1}) == min((min(naive[key]) for key in range(*asked)), default=float("inf"))


@given(lists=st.lists(st.integers(0, 50), max_size=200))
def test_both_ends_forget_the_same_lists(lists: list[int]) -> None:
    sender, receiver = KeyCache(), KeyCache()
    for number in lists:
        if sender.knows(str(number), tensor([number])):
            assert receiver.recall(str(number)).tolist() == [number]
        else:
            receiver.note(str(number), tensor([number]))


@given(rows=st.lists(st.sampled_from([0.0, 0.0, 1.5, -2.0]), min_size=1, max_size=40))
def test_rows_of_zeros_need_not_go(rows: list[float]) -> None:
    values = torch.tensor(rows, dtype=torch.float64).unsqueeze(1)
    body, payload = pack_values(values)
    found = torch.full_like(values, 7.0)
    unpack_values(body, payload, found)
    assert torch.equal(found, values)
    assert sum(map(len, payload)) <= values.nbytes


@given(st.lists(KEYS, max_size=6), st.booleans())
def test_what_a_filter_holds_back_is_sent_later(pushes: list[list[int]], increments: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    changed, sent, value = SignificantlyModified(1.0, increments=increments), Rows(1, torch.float64), [0.0] * NUM_KEYS
    for keys in pushes:
        drawn = torch.randn(len(keys), 1, generator=generator, dtype=torch.float64)
        for key, draw in zip(keys, drawn[:, 0].tolist(), strict=True):
            value[key] = value[key] + draw if increments else draw
        some = changed(Pairs(tensor(keys), drawn))
        assert (some.values.abs() > 1.0).all()
        sent.write(some.keys, sent.read(some.keys) + some.values)
        for key in keys:
            assert abs(float(sent.read(tensor([key]))) - value[key]) <= 1.0 + 1e-12


@pytest.mark.parametrize("increments", [False, True])
def test_a_value_that_is_no_number_is_not_held_back(increments: bool) -> None:
    changed = SignificantlyModified(1.0, increments=increments)
    assert changed(Pairs(tensor([1, 2]), torch.tensor([[float("nan")], [0.5]]))).keys.tolist() == [1]
    if increments:
        assert changed(Pairs(tensor([1]), torch.tensor([[2.0]]))).values.item() == 2.0


def test_gradients_that_leave_a_weight_at_0_are_left_out() -> None:
    weights = torch.tensor([[0.0], [0.0], [0.5]])
    pushed = Pairs(tensor([2, 5, 7]), torch.tensor([[0.4], [-0.6], [0.1]]))
    for same in (weights, weights[:, 0]):
        kept = kkt(same, l1=1.0, scale=2.0)(pushed)
        assert kept.keys.tolist() == [5, 7]
        assert kept.values.tolist() == [[pytest.approx(-0.6)], [pytest.approx(0.1)]]
