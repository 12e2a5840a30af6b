"""Scripts that go other ways through their data: each does what it says, or is told at once why it cannot.

A new kind of script is one new row here, which goes a way of `odd_reading.py`. Where it is not refused, a run equals
the same script in one process with the combined batches, and its records count the samples that it has trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import RunFailed
from tests.conformance import virtual_engine
from tests.conformance.odd_judging import ENGINES, JOINT
from tests.conformance.odd_reading import (
    NUM_EPOCHS,
    NUM_SAMPLES,
    NUM_WORKERS,
    ahead,
    beside_noise,
    endless_sampler,
    from_another,
    in_chunks,
    in_thread,
    losses_first,
    normalised,
    of_samples,
    only,
    scaled,
    slices,
    stream,
    train,
    twice,
    unequal_batches,
    unequal_data,
    without,
)
from tests.conformance.reference import Script, train_alone
from tests.conformance.scripts import (
    BATCH_SIZE,
    EXACT,
    assert_close,
    launched,
    loader_of,
    momentum,
    perceptron,
    plain_step,
    samples,
)
from tests.covering import covering, left_to


@dataclass(frozen=True)
class Odd:
    """A script, and what becomes of it."""

    name: str
    script: Script
    samples: int | None = NUM_SAMPLES * NUM_EPOCHS
    """That all workers together train on; None: the script is refused."""
    refusal: str = ""
    only_on: str = ""
    """The engine that this holds for, if it is not both."""


ALIKE = 11 * NUM_WORKERS * BATCH_SIZE + 7
"""Samples, of which the last batch of one rank is as long as all others."""
NOT_PREPARED = r"rank \d: the optimizer steps, and the script has taken no batch of the loader that prepare returned"
NOT_TOLD = r"rank \d, epoch 0: .* nothing tells which of the batches 10, 11, 12 it trained on"
IN_THREAD = r"rank \d reads the loader in another thread"

ODD = (
    Odd("plain", train),
    Odd("one ahead", partial(train, way=ahead)),
    Odd("one ahead, in one memory", partial(train, way=ahead, loader=slices)),
    Odd("three ahead", partial(train, way=partial(ahead, depth=3))),
    Odd("in chunks", partial(train, way=in_chunks)),
    Odd("one ahead, copied", partial(train, way=partial(ahead, copies=True))),
    Odd("three ahead, copied", partial(train, way=partial(ahead, depth=3, copies=True))),
    Odd(
        "one ahead, copied, as long as others",
        partial(train, way=partial(ahead, copies=True), loader=partial(of_samples, count=ALIKE)),
        samples=ALIKE * NUM_EPOCHS,
    ),
    Odd(
        "one ahead, scaled, no longer told apart",
        partial(train, way=scaled, loader=partial(of_samples, count=ALIKE)),
        samples=None,
        refusal=NOT_TOLD,
    ),
    Odd("in a thread", partial(train, way=in_thread), only_on="processes"),
    Odd("in a thread, accumulating", partial(train, way=in_thread, accumulates=True), only_on="processes"),
    Odd("in a thread, virtually", partial(train, way=in_thread), samples=None, refusal=IN_THREAD, only_on="virtual"),
    Odd("without the first", partial(train, way=partial(without, numbers=(0,))), samples=(91 - 8) * NUM_EPOCHS),
    Odd("without some", partial(train, way=partial(without, numbers=(3, 4, 8))), samples=(91 - 24) * NUM_EPOCHS),
    Odd(
        "without the last full one", partial(train, way=partial(without, numbers=(10,))), samples=(91 - 8) * NUM_EPOCHS
    ),
    Odd("without the last", partial(train, way=partial(without, numbers=(11,))), samples=88 * NUM_EPOCHS),
    Odd("left early", partial(train, way=partial(only, count=5)), samples=40 * NUM_EPOCHS),
    Odd("twice", partial(train, way=twice)),
    Odd("twice, one ahead", partial(train, way=partial(twice, way=ahead))),
    Odd("accumulating, one ahead", partial(train, way=ahead, accumulates=True)),
    Odd("accumulating without exchange, one ahead", partial(train, way=ahead, accumulates=True, no_sync=True)),
    Odd(
        "accumulating without some",
        partial(train, way=partial(without, numbers=(3, 10)), accumulates=True, no_sync=True),
        samples=(91 - 16) * NUM_EPOCHS,
    ),
    Odd("two at once, a step", partial(train, way=partial(in_chunks, size=2), accumulates=True)),
    Odd("five at once, two a step", partial(train, way=in_chunks, accumulates=True)),
    Odd("two losses, then two backward passes", losses_first),
    Odd("two losses, then two backward passes, the last one's first", partial(losses_first, last_first=True)),
    Odd("noise beside each batch, one ahead", beside_noise),
    Odd("a stream", partial(train, loader=stream)),
    Odd("a stream, one ahead", partial(train, loader=stream, way=ahead)),
    # The tests' processes must not start others.
    Odd("a stream, two loader workers", partial(train, loader=partial(stream, num_workers=2)), only_on="virtual"),
    Odd("a stream that splits itself", partial(train, loader=partial(stream, splits=True))),
    Odd(
        "an endless stream",
        partial(train, loader=partial(stream, is_endless=True), way=partial(only, count=20)),
        samples=160 * NUM_EPOCHS,
    ),
    Odd(
        "an endless sampler",
        partial(train, loader=endless_sampler, way=partial(only, count=20)),
        samples=160 * NUM_EPOCHS,
    ),
    Odd(
        "batch norm of one sample",
        partial(train, model=normalised),
        samples=None,
        refusal=r"rank \d: batch 12 of epoch 0 leaves '2' one value a channel.*drop_last=True or another batch size",
    ),
    Odd("a loader that was not prepared", partial(train, way=from_another), samples=None, refusal=NOT_PREPARED),
    Odd(
        "another batch size on rank 1",
        partial(train, loader=unequal_batches),
        samples=None,
        refusal="rank 0's DataLoader has batch size 4, rank 1's has batch size 5",
    ),
    Odd(
        "less data on rank 1",
        partial(train, loader=unequal_data),
        samples=None,
        refusal="rank 0's DataLoader has samples 91, rank 1's has samples 90",
    ),
)
QUICK_IN_PROCESSES = ("one ahead", "in a thread", "a stream that splits itself", "less data on rank 1")


def cases() -> Iterator[Any]:
    """Every row under all-reduce and a server in turns, on both engines; most of those in processes are left to
    `make test-slow`."""
    for engine in ENGINES:
        for strategy, odd, is_chosen in covering([odd for odd in ODD if odd.only_on in ("", engine)], [JOINT]):
            in_turn = is_chosen and engine == "virtual"
            is_quick = in_turn or (strategy == "all-reduce" and odd.name in QUICK_IN_PROCESSES)
            marks = left_to(is_quick=is_quick, is_chosen=is_chosen)
            yield pytest.param(engine, strategy, odd, id=f"{engine}-{strategy}-{odd.name}", marks=marks)


@pytest.mark.parametrize("strategy", ["all-reduce", "ps-bsp"])
@pytest.mark.parametrize(
    "script",
    [
        partial(train, way=partial(in_chunks, size=2, copies=True), accumulates=True),
        partial(losses_first, copies=True),
        partial(losses_first, copies=True, last_first=True),
    ],
    ids=["a step for two", "two losses first", "two losses first, the last one's first"],
)
def test_copies_of_two_batches_count_as_they_should(script: Script, strategy: str, tmp_path: Path) -> None:
    """Though records may take two full ones for one."""
    result = virtual_engine.run(partial(launched, script), strategy=strategy, workers=NUM_WORKERS, out=tmp_path)
    assert_close(result.model_state(), train_alone(script, NUM_WORKERS), EXACT)


def samples_in(result: Any) -> int:
    return sum(record.samples for record in result.steps)


@pytest.mark.parametrize(("engine", "strategy", "odd"), list(cases()))
def test_odd_scripts_under_synchronous_strategies(engine: str, strategy: str, odd: Odd, tmp_path: Path) -> None:
    run = partial(
        ENGINES[engine].run, partial(launched, odd.script), strategy=strategy, workers=NUM_WORKERS, out=tmp_path
    )
    if odd.samples is None:
        with pytest.raises(RunFailed, match=odd.refusal):
            run()
        return
    result = run()
    assert_close(result.model_state(), train_alone(odd.script, NUM_WORKERS), EXACT)
    assert samples_in(result) == odd.samples


@pytest.mark.parametrize("strategy", ["ps-asp", "ps-ssp"])
@pytest.mark.parametrize("name", ["batch norm of one sample", "another batch size on rank 1", "less data on rank 1"])
def test_data_are_refused_under_asynchronous_strategies(name: str, strategy: str, tmp_path: Path) -> None:
    odd = next(odd for odd in ODD if odd.name == name)
    with pytest.raises(RunFailed, match=odd.refusal):
        virtual_engine.run(partial(launched, odd.script), strategy=strategy, workers=NUM_WORKERS, out=tmp_path)


@pytest.mark.parametrize("odd", [odd for odd in ODD if odd.samples and not odd.only_on], ids=lambda odd: odd.name)
def test_odd_scripts_under_an_asynchronous_strategy(odd: Odd, tmp_path: Path) -> None:
    result = virtual_engine.run(partial(launched, odd.script), strategy="ps-asp", workers=NUM_WORKERS, out=tmp_path)
    assert samples_in(result) == odd.samples


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("ps-asp", {}), ("ps-ssp", {}), ("gossip", {}), ("local-sgd", {}), ("fed-avg", {"clients": 4, "fraction": 1.0})],
)
def test_a_loader_that_was_not_prepared_is_refused_under_every_kind(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run = partial(virtual_engine.run, strategy=strategy, options=options, workers=NUM_WORKERS, out=tmp_path)
    with pytest.raises(RunFailed, match=NOT_PREPARED):
        run(partial(launched, partial(train, way=from_another)))


def of_its_own(worker: Any) -> nn.Module:
    """Each rank makes its data itself, and says so."""
    loader = loader_of(samples(NUM_SAMPLES))
    loader.dataset.differs_by_rank = True  # type: ignore[attr-defined]
    network = perceptron()
    network, optimizer, _ = worker.prepare(network, momentum(network.parameters()), loader)
    for batch in loader_of(samples(8)):
        plain_step(network, optimizer, batch)
    return network


def test_workers_may_make_data_of_their_own(tmp_path: Path) -> None:
    run = partial(virtual_engine.run, strategy="all-reduce", out=tmp_path)
    result = run(partial(launched, of_its_own), workers=NUM_WORKERS)
    assert [record.step for record in result.steps] == [1, 1, 2, 2]


def test_virtual_runs_of_streams_repeat_themselves(tmp_path: Path) -> None:
    script = partial(train, loader=partial(stream, splits=True), way=ahead)
    states = [
        virtual_engine.run(
            partial(launched, script), strategy="all-reduce", workers=NUM_WORKERS, out=tmp_path / str(number)
        ).model_state()
        for number in range(2)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
