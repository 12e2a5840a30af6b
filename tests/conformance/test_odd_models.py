"""Odd models, optimizers and training steps: each does what its script says, or is told at once why it cannot.

A new oddity is one new row. Where it is not refused, synchronous strategies equal one process with the combined batch,
and the others, with one worker, that process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, Muon

from paceline.errors import RunFailed
from tests.conformance import odd_loops as loops
from tests.conformance import odd_models as odd
from tests.conformance import odd_steps as steps
from tests.conformance import virtual_engine
from tests.conformance.odd_judging import ENGINES, FREE, JOINT, SERVERS
from tests.conformance.reference import Script, train_alone
from tests.conformance.scripts import (
    EXACT,
    NUM_CLASSES,
    assert_close,
    closure_step,
    launched,
    momentum,
    perceptron,
    plain_step,
    samples,
    train,
    zero_in_place_step,
)
from tests.conformance.settings import SOON_S
from tests.covering import covering, left_to

HALF_PRECISION = {"rtol": 0.03, "atol": 0.003}
SEVERAL = ("all-reduce", *SERVERS)
EVERY = ("single", *SEVERAL)


@dataclass(frozen=True)
class Odd:
    """A script, and what becomes of it."""

    name: str
    script: Script
    refused: tuple[str, ...] = ()
    """The strategies that refuse it."""
    says: str = ""
    """What they say: the culprit, and the remedy."""
    tolerance: Any = None
    only_on: str = ""
    """The engine that this holds for, if it is not both."""


def odd_row(
    name: str,
    *,
    model: Callable[[], nn.Module] = perceptron,
    optimizer: Callable[[Any], Any] = momentum,
    step: Callable[..., object] = plain_step,
    count: int = 43,
    refused: tuple[str, ...] = (),
    says: str = "",
    tolerance: Any = EXACT,
    only_on: str = "",
) -> Odd:
    """A row whose loop is the common one; the last global batch of the data is smaller."""
    script = partial(train, model=model, optimizer=optimizer, step=step, data=partial(samples, count), num_epochs=2)
    return Odd(name, script, refused, says, tolerance, only_on)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(NUM_CLASSES)).double()


def on_meta() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, NUM_CLASSES, device="meta"))


def frozen_norm() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, NUM_CLASSES)).double()
    model[2].eval()
    return model


def all_workers_norm() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, NUM_CLASSES)).double()
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def matrices() -> nn.Module:
    first, last = nn.Linear(64, 16, bias=False), nn.Linear(16, NUM_CLASSES, bias=False)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), last).double()


def trained_only(params: Any) -> Any:
    return momentum([parameter for parameter in params if parameter.requires_grad])


def with_empty_group(params: Any) -> Any:
    return momentum([{"params": []}, {"params": list(params)}])


def backwards(params: Any) -> Any:
    return momentum(list(params)[::-1])


EVALUATES = r"evaluates the model itself, perhaps several times a step, which this strategy does not allow; use all"
SHARED = r"share memory, which they would not where servers or neighbours read .*; tie layers by assigning one Param"
SUMMED = (
    r"rank \d: the loss is a sum over the batch \(NllLoss with reduction='sum'\).*take the mean \(reduction='mean'\)"
)
NEVER_STEPS = r"rank \d: the script changes the parameters batch after batch and never calls optimizer\.step\(\)"
KEEPS = r"servers cannot build SharpnessAware .* attribute 'inner' holds tensors or another optimizer.*use all-reduce"
STEPS_ANOTHER = (
    KEEPS + r"|SGD steps the parameter '1\.weight' of a prepared model and was not prepared itself"
    r"|the script changes or reads optimizer\.state, which the servers hold"
)
IN_PLACE = r"step 1: the script changed parameters in place on rank \d, but the servers own them"
TWICE = r"gradient of '.*' was computed twice in one backward pass.*use_reentrant=False"
NOT_INSIDE = r"on the virtual engine nothing can be waited for in the middle of a backward pass.*use_reentrant=False"
sharpness = partial(odd.SharpnessAware, lr=0.05)

ODD = (
    # Parameters and buffers.
    odd_row("complex parameters", model=odd.Complex),
    odd_row("complex parameters, adam", model=odd.Complex, optimizer=partial(Adam, lr=0.01)),
    odd_row("masks, infinities, whole numbers and truths in buffers", model=odd.Masked),
    odd_row("buffers replaced", model=odd.ReplacesBuffers, count=48),
    odd_row("three dtypes", model=odd.MixedDtypes, tolerance=HALF_PRECISION),
    odd_row("parameters without elements", model=odd.Empty),
    odd_row("parameters without elements, adam", model=odd.Empty, optimizer=partial(Adam, lr=0.01)),
    odd_row("strided parameters", model=odd.Strided),
    odd_row("strided parameters, adam", model=odd.Strided, optimizer=partial(Adam, lr=0.01)),
    odd_row("slices of one tensor", model=odd.Slices),
    odd_row("channels last", model=odd.channels_last),
    odd_row("weight norm and spectral norm", model=odd.reparametrized),
    odd_row("pruned", model=odd.pruned),
    odd_row("frozen batch norm", model=frozen_norm),
    odd_row("recurrent", model=odd.Recurrent),
    odd_row("low-rank adapters", model=odd.Adapted),
    odd_row("quantised, straight through", model=odd.Quantised),
    odd_row("lazy layers", model=lazy, refused=EVERY, says=r"'1\.weight' has no shape yet.*call the model once before"),
    odd_row("no values yet", model=on_meta, refused=EVERY, says=r"'1\.weight' is on the device meta and has no values"),
    odd_row("a sparse buffer", model=odd.SparseBuffer, refused=EVERY, says=r"'graph' is a torch\.sparse_coo tensor"),
    odd_row("tied by memory", model=odd.TiedByMemory, refused=SERVERS, says=r"'first\.weight' and 'second.*" + SHARED),
    odd_row("a parameter's memory in a buffer", model=partial(odd.Aliased, buffer=True), refused=SERVERS, says=SHARED),
    odd_row(
        "a parameter's memory in an attribute", model=partial(odd.Aliased, buffer=False), refused=SERVERS, says=SHARED
    ),
    odd_row("initialised by data", model=odd.InitialisedByData, refused=SERVERS, says=IN_PLACE),
    odd_row("an embedding", model=odd.Embedded),
    odd_row(
        "an embedding with max_norm",
        model=partial(odd.Embedded, max_norm=0.5),
        refused=SEVERAL,
        says=r"'table' has max_norm=0\.5.*bound the norm after optimizer\.step\(\)",
    ),
    odd_row(
        "an embedding that counts rows",
        model=partial(odd.Embedded, scale_grad_by_freq=True),
        refused=JOINT,
        says=r"'table' has scale_grad_by_freq=True.*divide the rows of weight\.grad between",
    ),
    odd_row(
        "batch norm of all workers",
        model=all_workers_norm,
        refused=SEVERAL,
        says=r"'2' is a SyncBatchNorm.*say so with nn\.BatchNorm1d",
    ),
    odd_row(
        "sparse gradients",
        model=partial(odd.Embedded, sparse=True),
        optimizer=partial(torch.optim.Adagrad, lr=0.1),
    ),
    # Backward passes.
    odd_row("checkpointed", model=partial(odd.Checkpointed, reentrant=False)),
    odd_row("checkpointed, shared layer", model=partial(odd.Checkpointed, reentrant=False, part="shared")),
    odd_row("checkpointed, reentrant", model=partial(odd.Checkpointed, reentrant=True)),
    odd_row(
        "checkpointed, reentrant, shared layer",
        model=partial(odd.Checkpointed, reentrant=True, part="shared"),
        refused=SEVERAL,
        says=TWICE,
    ),
    odd_row(
        "checkpointed, reentrant, all but the first layer",
        model=partial(odd.Checkpointed, reentrant=True, part="rest"),
        only_on="processes",
    ),
    odd_row(
        "checkpointed, reentrant, all but the first layer, virtually",
        model=partial(odd.Checkpointed, reentrant=True, part="rest"),
        refused=JOINT,
        says=NOT_INSIDE,
        only_on="virtual",
    ),
    odd_row("one graph twice", step=steps.same_graph_twice),
    odd_row("several losses", model=odd.TwoHeads, step=steps.two_losses_step),
    odd_row("several losses at once", model=odd.TwoHeads, step=steps.joint_losses_step),
    odd_row("a summed loss", step=steps.summed_step, refused=JOINT, says=SUMMED),
    odd_row("a term of the loss that is a sum", step=steps.summed_term_step, refused=JOINT, says=SUMMED),
    odd_row("losses of samples, summed", step=steps.summed_by_hand_step, refused=JOINT, says=r"is a sum .*\(sum\(\)\)"),
    odd_row("a summed loss, divided", step=steps.divided_step),
    odd_row("a summed penalty", step=steps.summed_penalty_step),
    odd_row("microbatches", step=steps.microbatches_step),
    odd_row("gradient penalty", step=steps.penalised_step),
    odd_row(
        "graph of the gradients",
        step=steps.graph_of_gradients_step,
        refused=SEVERAL,
        says=r"the gradient of '.*' has a history \(create_graph=True\).*torch\.autograd\.grad",
    ),
    odd_row("anomaly detection", step=steps.detecting_anomalies_step),
    odd_row(
        "autocast",
        model=partial(perceptron, torch.float32),
        step=steps.autocast_step,
        tolerance=HALF_PRECISION,
    ),
    odd_row("distilled", model=odd.Distilled, step=steps.distilling_step, optimizer=trained_only),
    Odd("hooks on gradients, before", partial(loops.with_hooks, when="before", kind="gradient")),
    Odd("hooks on gradients, after", partial(loops.with_hooks, when="after", kind="gradient")),
    Odd("hooks on accumulated gradients, before", partial(loops.with_hooks, when="before", kind="accumulated")),
    Odd("hooks on accumulated gradients, after", partial(loops.with_hooks, when="after", kind="accumulated")),
    # Gradients that the script sets.
    odd_row("gradients set", step=steps.set_gradients),
    odd_row("gradients of a function", step=steps.functional_step),
    odd_row("gradients of each sample", step=steps.per_sample_step),
    odd_row(
        "gradients set and clipped",
        step=steps.set_and_clip,
        refused=JOINT,
        says=r"rank \d: the script set the gradient of '1\.weight' itself and changed it in place.*call loss\.backward",
    ),
    odd_row("each gradient clipped anew", step=steps.adaptive_clip_step, tolerance=EXACT),
    Odd("accumulated by hand", partial(loops.accumulating_by_hand, count=48)),
    Odd(
        "accumulated by hand, uneven tail",
        partial(loops.accumulating_by_hand, count=43),
        refused=JOINT,
        says=r"rank \d, epoch 0: .*which of the batches 5, 6 .*drop_last=True",
    ),
    odd_row("never zeroed", step=steps.never_zeroed_step),
    odd_row("zeroed in place", step=zero_in_place_step),
    odd_row("two steps a gradient", step=steps.two_steps_a_gradient),
    # Optimizers.
    odd_row("sharpness-aware", optimizer=sharpness, step=steps.sharpness_step, refused=SERVERS, says=KEEPS),
    odd_row(
        "sharpness-aware, in two calls",
        optimizer=sharpness,
        step=steps.two_call_step,
        refused=EVERY,
        says=STEPS_ANOTHER,
    ),
    # Longer runs of it magnify rounding without bound.
    odd_row(
        "lbfgs", optimizer=partial(LBFGS, max_iter=3), step=closure_step, count=16, refused=SERVERS, says=EVALUATES
    ),
    odd_row("an optimizer of its own", optimizer=partial(odd.Signed, lr=1e-3)),
    odd_row(
        "an optimizer of its own, with a closure",
        optimizer=partial(odd.Signed, lr=1e-3),
        step=closure_step,
        refused=SERVERS,
        says=EVALUATES,
    ),
    odd_row(
        "an optimizer with hooks", optimizer=odd.hooked, refused=SERVERS, says=r"SGD has step hooks.*use all-reduce"
    ),
    odd_row("adafactor", optimizer=partial(Adafactor, lr=0.01)),
    odd_row(
        "muon", model=matrices, optimizer=partial(Muon, lr=0.01), refused=SERVERS, says=r"servers cannot build Muon"
    ),
    odd_row("maximised", optimizer=partial(SGD, lr=0.001, maximize=True)),
    odd_row("a rate in a tensor", optimizer=partial(SGD, lr=torch.tensor(0.05, dtype=torch.float64))),
    odd_row("an empty group", optimizer=with_empty_group),
    odd_row("parameters backwards", optimizer=backwards),
    Odd("a schedule for each group", loops.group_schedules),
    Odd("never stepped", loops.by_hand, refused=EVERY, says=NEVER_STEPS),
    # What scripts do with their model.
    odd_row("averages of the weights", model=odd.Averaging, step=steps.averaging_step, optimizer=trained_only),
    Odd("copied after every step", loops.with_copies),
    Odd("weights swapped and put back", loops.swapping),
    odd_row("compiled", model=lambda: torch.compile(perceptron(), backend="eager"), only_on="virtual"),  # type: ignore[return-value,arg-type]
    Odd("compiled after prepare", loops.compiled_after),
)
QUICK_IN_PROCESSES = (
    "complex parameters",
    "hooks on accumulated gradients, after",
    "sharpness-aware",
    "checkpointed, reentrant, all but the first layer",
)


def cases() -> Iterator[Any]:
    """Virtually under a strategy in which workers train alike, and under one that a single worker has to itself, which
    is left to `make test-slow`. In processes, where only the way of the bytes is another, some rows run under
    all-reduce, and the others, which are left to it, too, under all-reduce and a server in turns."""
    virtually = [row for row in ODD if row.only_on != "processes"]
    for strategy, row, is_chosen in covering(virtually, [JOINT, ("single", *FREE)], is_refused):
        yield case("virtual", strategy, row, left_to(is_quick=is_chosen and strategy in JOINT, is_chosen=is_chosen))
    apart = [row for row in ODD if row.only_on != "virtual"]
    for strategy, row, is_chosen in covering(apart, [JOINT]):
        is_quick = strategy == "all-reduce" and row.name in QUICK_IN_PROCESSES
        yield case("processes", strategy, row, left_to(is_quick=is_quick, is_chosen=is_chosen or bool(row.only_on)))


def is_refused(strategy: str, row: Odd) -> bool:
    return strategy in row.refused


def case(engine: str, strategy: str, row: Odd, marks: Any) -> Any:
    return pytest.param(engine, strategy, row, id=f"{engine}-{strategy}-{row.name}", marks=marks)


@pytest.mark.parametrize(("engine", "strategy", "row"), list(cases()))
@pytest.mark.filterwarnings("ignore:Using backward")
def test_odd_models(engine: str, strategy: str, row: Odd, tmp_path: Path) -> None:
    workers = 2 if strategy in JOINT or (is_refused(strategy, row) and strategy != "single") else 1
    run = partial(
        ENGINES[engine].run,
        partial(launched, row.script),
        strategy=strategy,
        workers=workers,
        out=tmp_path,
    )
    if is_refused(strategy, row):
        began_s = time.monotonic()
        with pytest.raises(RunFailed, match=row.says):
            run()
        assert time.monotonic() - began_s < SOON_S
        return
    assert_close(run().model_state(), train_alone(row.script, workers), row.tolerance or EXACT)


@pytest.mark.parametrize(
    ("strategy", "row"),
    [
        pytest.param(strategy, row, marks=left_to(is_quick=False, is_chosen=is_chosen))
        for strategy, row, is_chosen in covering([row for row in ODD if row.only_on != "processes"], [FREE], is_refused)
        if not is_refused(strategy, row)
    ],
)
def test_odd_models_under_asynchronous_strategies(row: Odd, strategy: str, tmp_path: Path) -> None:
    """Two workers train on all their data, and parameters stay finite."""
    result = virtual_engine.run(partial(launched, row.script), strategy=strategy, workers=2, out=tmp_path)
    taken = {worker: [step for step in result.steps if step.worker == worker] for worker in range(2)}
    assert len(taken[0]) == len(taken[1]) > 0
    assert result.iteration == len(result.steps)
    state = result.model_state()
    assert all(state[name].isfinite().all() for name in state if "infinite" not in name)


# --- backward passes that not every rank makes ----------------------------------------------------------------------

OUT_OF_TURN = r"step 6: backward passes since the last optimizer\.step\(\): rank 0 1, rank 1 2{}; every rank"


@pytest.mark.parametrize(
    ("engine", "workers", "at", "says"),
    [
        ("virtual", 2, 1, r"rank 0 for all_gather .*rank 1 for all_reduce"),  # a pause comes after the first step
        ("virtual", 2, 5, OUT_OF_TURN.format("")),
        ("virtual", 3, 5, OUT_OF_TURN.format(", rank 2 2")),  # in the exchange in which rank 0 has gone on
        ("processes", 2, 5, OUT_OF_TURN.format("")),
        (
            "virtual",
            2,
            0,
            r"rank 0 for all_gather .*rank 1 for all_reduce|rank 1 for all_reduce.* rank 0 for all_gather",
        ),
        (
            "processes",
            2,
            0,
            r"ranks disagree on an operation: rank 0 asks for all_gather .*; every rank must make the same",
        ),
    ],
)
def test_backward_passes_too_many_are_refused(engine: str, workers: int, at: int, says: str, tmp_path: Path) -> None:
    script = partial(launched, partial(loops.too_many, at=at))
    began_s = time.monotonic()
    with pytest.raises(RunFailed, match=says):
        ENGINES[engine].run(script, strategy="all-reduce", workers=workers, out=tmp_path)
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize("strategy", ["ps-bsp", "ps-ssp", "ps-asp", "gossip", "ad-psgd", "local-sgd"])
def test_backward_passes_too_many_are_each_workers_own_where_gradients_are(strategy: str, tmp_path: Path) -> None:
    script = partial(launched, partial(loops.too_many, at=5))
    result = virtual_engine.run(script, strategy=strategy, workers=2, out=tmp_path)
    assert [sum(step.worker == rank for step in result.steps) for rank in (0, 1)] == [12, 12]


def test_a_backward_pass_too_many_in_half_precision_is_refused(tmp_path: Path) -> None:
    script = partial(launched, partial(loops.too_many, at=5, dtype=torch.bfloat16))
    with pytest.raises(RunFailed, match=OUT_OF_TURN.format("")):
        virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path)


# --- optimizers that call their closure themselves ------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["all-reduce", "gossip", "local-sgd"])
def test_an_own_closure_gives_what_gradients_would(strategy: str, tmp_path: Path) -> None:
    """Also where a batch counts less, and without an exchange of the gradients of the step before."""
    runs = []
    for number, step in enumerate((plain_step, closure_step)):
        script = partial(train, optimizer=partial(odd.Signed, lr=1e-3), step=step, data=partial(samples, 43))
        runs.append(
            virtual_engine.run(partial(launched, script), strategy=strategy, workers=2, out=tmp_path / str(number))
        )
    plain, own = (result.model_state() for result in runs)
    assert all(torch.equal(plain[name], own[name]) for name in plain)
    moved = [sum(record.moved_bytes for record in result.steps) for result in runs]
    assert moved[1] < 1.5 * moved[0] + 1  # the loss alone is exchanged besides


# --- buffers --------------------------------------------------------------------------------------------------------


def test_a_buffer_of_another_shape_on_each_worker_is_the_first_ones(tmp_path: Path) -> None:
    script = partial(train, model=odd.KeepsInput, optimizer=momentum, data=partial(samples, 91))
    result = virtual_engine.run(partial(launched, script), strategy="all-reduce", workers=2, out=tmp_path)
    state = result.model_state()
    expected = train_alone(script, 2)
    shared = [name for name in expected if name != "last"]
    assert_close({name: state[name] for name in shared}, {name: expected[name] for name in shared}, EXACT)
    assert torch.equal(state["last"], expected["last"][: len(state["last"])])
