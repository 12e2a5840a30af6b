"""Trees of arrays, exchanged among ranks: in their own kinds, or refused on every rank."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import paceline
from paceline.comm.alone import AloneCollective
from paceline.comm.base import Collective
from paceline.errors import RunFailed, UsageError
from paceline.training.integer_means import average_integers
from paceline.training.trees import all_reduce_tree, broadcast_tree
from tests.conformance import virtual_engine
from tests.conformance.rows import prepared
from tests.conformance.scripts import launched
from tests.unit.collective_harness import World

SIZE = 3


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture(scope="module", params=["shared_memory", "gloo"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, SIZE) as world:
        yield world


def tree_of(rank: int) -> dict[str, Any]:
    return {
        "layers": [{"w": torch.full((2, 3), float(rank)), "b": np.full(4, rank, dtype=np.float64)}, None],
        "pair": Pair(np.float32(rank), (torch.arange(3) * rank, [])),
        "count": rank,
        "rate": 0.5 * rank,
        "transposed": torch.arange(6.0).view(2, 3).T * rank,
    }


def reduced(collective: Collective, op: str) -> tuple[Any, Any]:
    tree = tree_of(collective.rank)
    return all_reduce_tree(collective, tree, op=op), tree  # type: ignore[arg-type]


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif wanted is not None:
        assert getattr(found, "dtype", None) == getattr(wanted, "dtype", None)
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted))


@pytest.mark.parametrize(("op", "factor"), [("sum", SIZE), ("mean", 1)])
def test_leaves_are_joined_and_keep_their_kinds(world: World, op: str, factor: int) -> None:
    """Ranks 0, 1 and 2 hold multiples of the tree of rank 1, whose mean is that tree."""
    for rank, (found, given_tree) in enumerate(world.run(reduced, op)):
        assert_same(found, tree_of(factor))
        assert_same(given_tree, tree_of(rank))


INTEGERS = {str(dtype): dtype for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)}


def averaged(collective: Collective, values: dict[str, list[list[int]]]) -> Any:
    """By trees, and in place; `values`: each rank's, by dtype."""
    own = {name: torch.tensor(each[collective.rank], dtype=INTEGERS[name]) for name, each in values.items()}
    found = all_reduce_tree(collective, own, op="mean")
    for tensor in own.values():
        average_integers(collective, tensor)
    return found, own


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_mean_of_integers_is_exact(world: World, data: st.DataObject) -> None:
    """The oracle computes with as many digits as it takes."""
    ends = {name: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for name, dtype in INTEGERS.items()}
    drawn = {name: st.lists(st.integers(*span), min_size=4, max_size=4) for name, span in ends.items()}
    values = {name: [[*ends[name], *data.draw(drawn[name])] for _ in range(SIZE)] for name in INTEGERS}
    sums = {name: [sum(column) for column in zip(*each, strict=True)] for name, each in values.items()}
    wanted = {name: [abs(one) // SIZE * (1 if one > 0 else -1) for one in each] for name, each in sums.items()}
    for results in world.run(averaged, values):
        for found in results:
            assert {name: tensor.tolist() for name, tensor in found.items()} == wanted
            assert {name: tensor.dtype for name, tensor in found.items()} == INTEGERS


def of_script() -> None:
    worker = paceline.init()
    most = torch.full((3,), 127 - worker.rank, dtype=torch.int8)
    assert worker.all_reduce(most, op="mean").tolist() == [126] * 3
    assert most.tolist() == [126] * 3
    largest = torch.tensor([2**64 - 1 if worker.rank == 0 else 0], dtype=torch.uint64)
    for average in (worker.all_reduce, worker.all_reduce_tree):
        with pytest.raises((TypeError, UsageError), match="mean of uint64 tensors is not possible"):
            average(largest, op="mean")


def test_a_script_s_mean_of_integers_does_not_overflow(tmp_path: Path) -> None:
    virtual_engine.run(of_script, strategy="all-reduce", workers=3, out=tmp_path)


def from_root(collective: Collective, root: int) -> Any:
    return broadcast_tree(collective, {**tree_of(collective.rank), "flag": collective.rank == root}, root=root)


def test_everybody_gets_the_root_s(world: World) -> None:
    for found in world.run(from_root, 2):
        assert_same(found, {**tree_of(2), "flag": True})


def operations(collective: Collective, what: str) -> str:
    """What this rank is told where rank 1 has another tree."""
    tree: dict[Any, Any] = {"a": [torch.zeros(2)], "b": 1.0}
    is_odd = collective.rank == 1
    if what == "shape":
        tree["a"][0] = torch.zeros(3 if is_odd else 2)
    elif what == "dtype":
        tree["b"] = 1 if is_odd else 1.0
    elif what == "key" and is_odd:
        tree["c"] = tree.pop("b")
    elif what == "container" and is_odd:
        tree["a"] = tuple(tree["a"])
    elif what == "kind" and is_odd:
        tree["b"] = "text"
    op = "max" if what == "op" and is_odd else "most" if what == "everyone's op" else "mean"
    try:
        all_reduce_tree(collective, tree, op=op)  # type: ignore[arg-type]
    except UsageError as error:
        told = str(error)
        collective.barrier()  # nobody is left behind in an exchange
        return told
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "at tree['a'][0]: rank 0 has float32[2], rank 1 has float32[3]"),
        ("dtype", "at tree['b']: rank 0 has float64[], rank 1 has int64[]"),
        ("key", "at tree['b']: rank 0 has float64[], rank 1 has nothing there"),
        ("container", "at tree['a']: rank 0 has a list, rank 1 has a tuple"),
        ("kind", "at tree['b']: rank 0 has float64[], rank 1 has what cannot be exchanged: str can be no leaf"),
        ("op", "rank 0 has all_reduce_tree(op='mean'), rank 1 has all_reduce_tree(op='max')"),
        ("everyone's op", "takes op='sum' or op='mean', not 'most'"),
    ],
)
def test_what_differs_is_told_on_every_rank(world: World, what: str, words: str) -> None:
    told = world.run(operations, what)
    assert len(set(told)) == 1
    assert words in told[0]


ARRAYS = st.builds(
    lambda shape, dtype: np.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["float32", "float64", "int64", "int32", "complex64", "uint8"]),
)
LEAVES = ARRAYS | ARRAYS.map(torch.from_numpy) | st.integers(-9, 9) | st.floats(-9, 9) | st.none()
TREES = st.recursive(
    LEAVES,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), parts, max_size=3)
        | st.builds(Pair, parts, parts)
    ),
    max_leaves=12,
)


@given(tree=TREES)
@settings(max_examples=60)
def test_alone_every_tree_comes_back_as_it_is(tree: Any) -> None:
    assert_same(all_reduce_tree(AloneCollective(), tree, op="mean"), tree)
    assert_same(broadcast_tree(AloneCollective(), tree, root=0), tree)


def test_dicts_of_other_kinds_stay_so() -> None:
    tree = {"ordered": OrderedDict(b=1.0, a=2.0), "default": defaultdict(list, x=1.0), "counter": Counter(x=3)}
    found = all_reduce_tree(AloneCollective(), tree, op="sum")
    assert_same(found, tree)
    assert list(found["ordered"]) == ["b", "a"]
    assert found["default"]["missing"] == []


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        ({1, 2}, r"tree\['x'\]: set can be no leaf"),
        (True, "bools have no sum"),
        (2**70, "does not fit 64 bits"),
        (np.array(["text"]), "arrays of str.* cannot be exchanged"),
        (torch.eye(2).to_sparse(), "is not dense numbers"),
        (np.ma.masked_array([1.0, 2.0], mask=[False, True]), "a masked array is not dense numbers"),
        (torch.empty(2, device="meta"), "is not dense numbers"),
    ],
    ids=repr,
)
def test_what_can_be_no_leaf_is_refused(leaf: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        all_reduce_tree(AloneCollective(), {"x": leaf}, op="sum")


def test_jax_arrays_come_back_as_such() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    tree = {"w": jax.numpy.arange(6.0).reshape(2, 3), "i": jax.numpy.arange(3), "b": jax.numpy.ones(5)}
    found = all_reduce_tree(AloneCollective(), tree, op="sum")
    first, second = (found[name].unsafe_buffer_pointer() for name in ("b", "w"))
    assert second - first == 64, "JAX has taken over the memory in which they travelled, one behind the other"
    for name, array in tree.items():
        assert isinstance(found[name], jax.Array)
        assert found[name].dtype == array.dtype
        assert (found[name] == array).all()


def test_a_typed_key_of_jax_is_told_what_to_give() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    key = jax.random.key(3)
    with pytest.raises(UsageError, match=r"tree\['key'\]: a typed key of JAX .* jax\.random\.key_data"):
        broadcast_tree(AloneCollective(), {"key": key}, root=0)
    data = broadcast_tree(AloneCollective(), {"key": jax.random.key_data(key)}, root=0)["key"]
    assert (jax.random.bits(jax.random.wrap_key_data(data)) == jax.random.bits(key)).all()


def loop(worker: Any) -> None:
    """A script's own loop over what no optimizer of torch's holds."""
    weights = worker.broadcast_tree({"w": np.full(3, float(worker.rank + 1))})
    model, optimizer, loader = prepared(worker)
    for number, (x, y, _) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        mean = worker.all_reduce_tree({"w": np.full(3, float(worker.rank + number))})
        weights = {"w": weights["w"] - mean["w"]}
        if number == 3:
            break
    np.testing.assert_allclose(weights["w"], 1 - sum(0.5 + number for number in range(4)))


def test_workers_exchange_trees_between_their_steps(tmp_path: Path) -> None:
    result = virtual_engine.run(partial(launched, loop), strategy="all-reduce", workers=2, out=tmp_path)
    assert result.iteration == 4


def test_workers_at_steps_of_their_own_do_not(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="all_reduce_tree in the training loop needs all workers at the same step"):
        virtual_engine.run(partial(launched, loop), strategy="ps-asp", workers=2, out=tmp_path)
