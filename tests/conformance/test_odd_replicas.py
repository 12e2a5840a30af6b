"""Scripts that would have replicas drift apart: each does what one process does, or ends at once and says why not.

A new kind of script is one new row. No row waits for a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import RunFailed
from tests.conformance import virtual_engine
from tests.conformance.odd_judging import ENGINES, FREE, JOINT, SERVERS
from tests.conformance.reference import Script, train_alone
from tests.conformance.scripts import (
    EXACT,
    assert_close,
    launched,
    loader_of,
    momentum,
    perceptron,
    samples,
)
from tests.conformance.settings import SOON_S
from tests.covering import covering, left_to

NUM_WORKERS, NUM_STEPS = 2, 24


class Run:
    """What a row may do at its places."""

    def __init__(self, worker: Any, model: nn.Module, optimizer: Optimizer) -> None:
        self.worker, self.model, self.optimizer = worker, model, optimizer
        self.number = 0

    @property
    def is_other(self) -> bool:
        """Whether this is not the first of several ranks."""
        return bool(self.worker.rank)


Change = Callable[[Run], object]


def nothing(run: Run) -> None:
    pass


def train(
    worker: Any,
    *,
    model: Callable[[], nn.Module] = perceptron,
    optimizer: Callable[..., Optimizer] = momentum,
    before: Change = nothing,
    prepared: Change = nothing,
    backward: Change = nothing,
    stepped: Change = nothing,
    skips: Callable[[Run], bool] = lambda run: False,
    ends: Callable[[Run], bool] = lambda run: False,
) -> nn.Module:
    """The usual loop, with a change before `prepare`, after it, between backward and step, or after each step."""
    network = model()
    run = Run(worker, network, optimizer(network.parameters()))
    before(run)
    network, updater, loader = worker.prepare(network, run.optimizer, loader_of(samples()))
    prepared(run)
    while run.number < NUM_STEPS:
        for x, y, _ in loader:
            run.number += 1
            if skips(run):
                continue
            updater.zero_grad()
            F.cross_entropy(network(x), y).backward()
            backward(run)
            updater.step()
            stepped(run)
            if run.number == NUM_STEPS or ends(run):
                return network
    return network


# --- parameters -----------------------------------------------------------------------------------------------------


def set_trained(run: Run, **layers: bool) -> None:
    for name, parameter in run.model.named_parameters():
        for layer, is_trained in layers.items():
            if name.startswith(layer.removeprefix("layer")):
                parameter.requires_grad_(is_trained)


def freeze_first(run: Run) -> None:
    set_trained(run, layer1=False)


def swap_layers(run: Run) -> None:
    if run.number == 3:
        set_trained(run, layer1=True, layer3=False)


def freeze_late(run: Run) -> None:
    if run.number == 3:
        set_trained(run, layer1=False)


def alternate(run: Run) -> None:
    set_trained(run, layer1=run.number % 2 == 0)


def add_parameter(run: Run) -> None:
    if run.number == 3:
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def replace_parameter(run: Run) -> None:
    run.model[1].weight = nn.Parameter(torch.full_like(run.model[1].weight, 0.1))  # type: ignore[index,union-attr]


def replace_in_both(run: Run) -> None:
    replace_parameter(run)
    run.optimizer.param_groups[0]["params"][0] = run.model[1].weight  # type: ignore[index]


def clamp_weights(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def load_weights(run: Run, *, on_all: bool) -> None:
    if on_all or run.is_other:
        state = {name: torch.full_like(tensor, 0.01) for name, tensor in run.model.state_dict().items()}
        run.model.load_state_dict(state)


def add_noise(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)


# --- settings and state of the optimizer ----------------------------------------------------------------------------


def follow_own_loss(run: Run) -> None:
    if run.number == 1:
        run.plateau = ReduceLROnPlateau(run.optimizer, factor=0.5, patience=0)  # type: ignore[attr-defined]
    run.plateau.step(1.0 - 0.01 * run.number * run.worker.rank)  # type: ignore[attr-defined]


def own_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 1 + run.worker.rank


def own_class(run: Run) -> None:
    if run.is_other:
        run.optimizer = Adam(run.model.parameters(), lr=0.05)


def warm_up(run: Run) -> None:
    """Steps that the optimizer has taken before, as one that was loaded with the script's own checkpoint."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for parameter in run.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        run.optimizer.step()
    run.optimizer.zero_grad()


def load_state(run: Run, *, at: int = 0, on_all: bool = True) -> None:
    if run.number != at or not (on_all or run.is_other):
        return
    model = perceptron()
    model.load_state_dict(run.model.state_dict())
    other = Run(run.worker, model, type(run.optimizer)(model.parameters(), **_given(run.optimizer)))
    warm_up(other)
    run.optimizer.load_state_dict(other.optimizer.state_dict())


def _given(optimizer: Optimizer) -> dict[str, Any]:
    return {name: optimizer.defaults[name] for name in ("lr", "momentum") if name in optimizer.defaults}


def keep_state(run: Run) -> None:
    """The optimizer's state becomes part of what is compared."""
    if run.number == NUM_STEPS:
        state = run.optimizer.state_dict()["state"]
        sums = [float(value.double().sum()) for _, each in sorted(state.items()) for value in each.values()]
        run.model.register_buffer("state", torch.tensor(sums))


# --- gradients and steps --------------------------------------------------------------------------------------------


def clip_data(run: Run, *, first: int) -> None:
    if run.number >= first:
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.mul_(0.25)


def clamp_data(run: Run, *, first: int) -> None:
    if run.number >= first:
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.clamp_(-1e-3, 1e-3)


def skip(run: Run, *, at: int, on_all: bool = False) -> bool:
    return run.number == at and (on_all or run.is_other)


# --- the table ------------------------------------------------------------------------------------------------------

EVERYWHERE = "everywhere"


@dataclass(frozen=True)
class Odd:
    """A script, and under which strategies it is refused, with what words; elsewhere it does what one process does."""

    name: str
    script: Script
    refused: Mapping[str, str] = field(default_factory=dict)
    """By strategy; under `everywhere` where several workers train."""


def under(strategies: tuple[str, ...], words: str) -> dict[str, str]:
    return dict.fromkeys(strategies, words)


STRANGE = r"the optimizer trains parameter '1.weight', .* which it did not when it was prepared.* before prepare"
NO_GRADIENT = (
    r"step \d+: parameter '1.weight' has no gradient on rank \d.*freeze it .* before prepare, or use all-reduce"
)
IN_PLACE = r"step \d: the script changed parameters in place on rank \d, but .*undo it: '.*weight'; .*or use all-reduce"
DRIFT = (
    r"after step \d+ parameter '.*weight' is not the same on all ranks: on rank 1 it is up to .*Make the same change"
)
RATE = r"param group 0: lr is 0\.\d+ on rank 0 and 0\.\d+ on rank 1.*"
CLIPPED = r"step 2: the script changed gradients .* on rank \d.*use --option combine=always"
UNEVEN = (
    r"rank 1 has taken \d+ steps on \d+ batches, rank 0 \d+ on \d+: .*Decide together whether to leave out a batch"
    r"|rank \d .*all_reduce.* rank \d .*leave out a batch or a step only where all do"
    r"|rank \d .*all_gather.* rank \d .*leave out a batch or a step only where all do"
)
LEFT = (
    r"the script of rank 1 has ended after \d steps on \d batches, and that of another rank has not: "
    r".*leave out a batch or a step only where all do"
)

ODD = (
    Odd("plain", train),
    Odd("plain adam", partial(train, optimizer=partial(Adam, lr=0.01), stepped=keep_state)),
    Odd("frozen before", partial(train, before=freeze_first)),
    Odd("frozen late", partial(train, stepped=freeze_late), under(SERVERS, NO_GRADIENT)),
    Odd("frozen in turns", partial(train, stepped=alternate), under(SERVERS, NO_GRADIENT)),
    Odd("swapped", partial(train, before=freeze_first, stepped=swap_layers), {EVERYWHERE: STRANGE}),
    Odd("added", partial(train, stepped=add_parameter), {EVERYWHERE: "trains parameter that is not of the model"}),
    Odd("replaced", partial(train, prepared=replace_parameter), under(SERVERS, NO_GRADIENT)),
    Odd("replaced in both", partial(train, prepared=replace_in_both), {EVERYWHERE: STRANGE}),
    Odd("clamped", partial(train, stepped=clamp_weights), under(SERVERS, IN_PLACE)),
    Odd("clamped before", partial(train, before=clamp_weights)),
    Odd("loaded", partial(train, prepared=partial(load_weights, on_all=True)), under(SERVERS, IN_PLACE)),
    Odd(
        "loaded on one",
        partial(train, prepared=partial(load_weights, on_all=False)),
        {"all-reduce": DRIFT, "ps-bsp": DRIFT, **under(SERVERS[1:], IN_PLACE)},
    ),
    Odd(
        "noise",
        partial(train, stepped=add_noise),
        {"all-reduce": DRIFT, "ps-bsp": DRIFT, **under(SERVERS[1:], IN_PLACE)},
    ),
    Odd("own plateau", partial(train, stepped=follow_own_loss), under(JOINT, RATE + "worker.all_reduce")),
    Odd("own rate", partial(train, before=own_rate), {EVERYWHERE: RATE + "give every rank the same optimizer"}),
    Odd(
        "own class", partial(train, before=own_class), {EVERYWHERE: "the optimizer is SGD on rank 0 and Adam on rank 1"}
    ),
    Odd("warm", partial(train, before=warm_up, stepped=keep_state)),
    Odd("warm adam", partial(train, optimizer=partial(Adam, lr=0.01), before=warm_up, stepped=keep_state)),
    Odd("state loaded", partial(train, prepared=load_state, stepped=keep_state)),
    Odd(
        "state loaded on one",
        partial(train, prepared=partial(load_state, on_all=False)),
        {
            "all-reduce": DRIFT,
            **under(SERVERS, "rank 1 has a state and that of rank 0 has none; load it on every rank"),
        },
    ),
    Odd(
        "state loaded late",
        partial(train, stepped=partial(load_state, at=3)),
        under(SERVERS, "loads its optimizer's state after the first batch.*or use all-reduce"),
    ),
    Odd("scaled through data", partial(train, backward=partial(clip_data, first=1))),
    Odd("clamped through data", partial(train, backward=partial(clamp_data, first=1))),
    Odd("scaled through data, later", partial(train, backward=partial(clip_data, first=2)), {"ps-bsp": CLIPPED}),
    Odd("clamped through data, later", partial(train, backward=partial(clamp_data, first=2)), {"ps-bsp": CLIPPED}),
    Odd("left out together", partial(train, skips=partial(skip, at=5, on_all=True))),
    Odd(
        "left out alone",
        partial(train, skips=partial(skip, at=5)),
        {
            "all-reduce": "rank 1 has taken 4 steps on 6 batches, rank 0 4 on 5: every.*Decide together",
            "ps-bsp": UNEVEN,
        },
    ),
    Odd("left out alone at the end", partial(train, skips=partial(skip, at=NUM_STEPS)), under(JOINT, UNEVEN)),
    Odd("left alone", partial(train, ends=partial(skip, at=5)), {"all-reduce": LEFT, "ps-bsp": UNEVEN}),
    Odd("left alone with a round", partial(train, ends=partial(skip, at=6)), {"all-reduce": LEFT, "ps-bsp": UNEVEN}),
)
QUICK_IN_PROCESSES = ("frozen in turns", "noise", "own plateau", "state loaded", "left out alone", "loaded on one")


def cases() -> Iterator[Any]:
    """Virtually under a strategy of each family. In processes, where only the way of the bytes is another, some rows
    run under the synchronous ones, and the others under one strategy each, which are left to `make test-slow`."""
    for strategy, odd, is_chosen in covering(ODD, [JOINT, FREE], refusal):
        yield case("virtual", strategy, odd, left_to(is_quick=is_chosen, is_chosen=is_chosen))
    for strategy, odd, is_chosen in covering(ODD, [(*JOINT, *FREE)]):
        is_quick = odd.name in QUICK_IN_PROCESSES and strategy in JOINT
        yield case("processes", strategy, odd, left_to(is_quick=is_quick, is_chosen=is_chosen))


def refusal(strategy: str, odd: Odd) -> str | None:
    return odd.refused.get(strategy, odd.refused.get(EVERYWHERE))


def case(engine: str, strategy: str, odd: Odd, marks: Any) -> Any:
    return pytest.param(engine, strategy, odd, id=f"{engine}-{strategy}-{odd.name}", marks=marks)


@pytest.mark.parametrize(("engine", "strategy", "odd"), list(cases()))
def test_odd_replicas(engine: str, strategy: str, odd: Odd, tmp_path: Path) -> None:
    began_s = time.monotonic()
    says = refusal(strategy, odd)
    run = partial(
        ENGINES[engine].run, partial(launched, odd.script), strategy=strategy, workers=NUM_WORKERS, out=tmp_path
    )
    if says is not None:
        with pytest.raises(RunFailed, match=f"(?s){says}"):
            run()
        assert time.monotonic() - began_s < SOON_S
    elif strategy in JOINT:
        assert_close(run().model_state(), train_alone(odd.script, NUM_WORKERS), EXACT)
    else:
        assert run().iteration >= NUM_STEPS


NOT_ALONE = ("swapped", "added", "replaced in both", "noise")


@pytest.mark.parametrize("odd", [odd for odd in ODD if odd.name not in NOT_ALONE], ids=lambda odd: odd.name)
def test_one_worker_does_what_the_script_says(odd: Odd, tmp_path: Path) -> None:
    result = virtual_engine.run(partial(launched, odd.script), strategy="single", workers=1, out=tmp_path)
    assert_close(result.model_state(), train_alone(odd.script, 1), EXACT)


def clamp_late(run: Run) -> None:
    if run.number >= 7:
        clamp_weights(run)


@pytest.mark.parametrize("strategy", [*SERVERS, "ad-psgd"])
def test_changes_through_data_are_noticed_long_after_a_pause(strategy: str, tmp_path: Path) -> None:
    script = partial(launched, partial(train, stepped=clamp_late))
    with pytest.raises(RunFailed, match=r"step ([89]|1\d): the script changed parameter.* on rank \d.*before prepare"):
        virtual_engine.run(script, strategy=strategy, workers=NUM_WORKERS, out=tmp_path)
