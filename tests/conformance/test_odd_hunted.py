"""Scripts that a hunt has found: each does what one process does, or ends at once and says why not.

A new kind of script is one new row here and one in `odd_hunted.py`, `odd_habits.py`, `odd_recipes.py`, `odd_data.py`,
`odd_batches.py`, `odd_weights.py` or `odd_losses.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.errors import RunFailed
from tests.conformance import (
    local_engine,
    odd_batches,
    odd_data,
    odd_habits,
    odd_hunted,
    odd_losses,
    odd_recipes,
    odd_weights,
    virtual_engine,
)
from tests.conformance.odd_judging import (
    ALONE,
    DRIFT,
    EVERYWHERE,
    FAMILIES,
    IN_PLACE,
    JOINT,
    NO_GRADIENT,
    OWN_DIVISOR,
    SAME_STEP,
    SERVERS,
    STRATEGIES,
    TOGETHER,
    judge,
)
from tests.conformance.odd_steps import set_gradients
from tests.conformance.scripts import BATCH_SIZE, launched, samples
from tests.covering import covering, left_to

MOVED = r"step \d: parameter '1.weight' was moved or replaced after prepare on rank \d.*before prepare"
STATE = r"rank \d: the script changes or reads optimizer.state, which the servers hold; .*or use all-reduce"
ATTRIBUTE = r"servers cannot build Damped from its own settings: its attribute 'damping' is 0.25 .*or use all-reduce"
TWO_PASSES = r"rank \d: the script goes on with a pass over the loader after it has begun another.*two loaders by name"
FILTERS = r"rank \d, epoch 0: of 4 samples the DataLoader's collation gives \d in batch \d.*Subset"
JOINED = r"rank \d, epoch 0: a loss goes backward that .* made of batches (10, )?11, 12, .*Call backward\(\) for each"
NOT_TOLD = r"rank \d, epoch 0: .* nothing tells which of the batches 11, 12 it trained on.*drop_last=True"
HOOK = r"rank \d: a hook of the script on the gradient of '\d\.(weight|bias)' clips it.*between loss\.backward\(\) and"
SUM = r"rank \d: the loss is a sum over the batch \(backward\(ones\)\).*take the mean"
SUM_OF_TORCH = r"rank \d: the loss is a sum over the batch \(NllLoss with reduction='sum'\).*take the mean"
SUM_BY_HAND = r"rank \d: the loss is a sum over the batch \(sum\(\)\).*take the mean"
LOOP = r"rank \d: the loss is a sum over the batch \(4 terms, one a sample\).*take the mean"
RATE = r"(step|round) \d+ param group 0: lr is .* on rank 1.*all_reduce"
PASS = r"in a backward pass parameter '\d\.weight' was not the same on ranks 0 and 1.*torch\.Generator of the same seed"
OWN_CHANGE = r"step \d: the script has changed the mean gradient of '\d\.weight' on rank 1 .*what worker\.all_reduce"
CONVERTED = r"parameter '\d\.\w+' (is torch.float32 instead of|was moved or converted).*convert it before prepare"
BESIDE = r"rank \d: the script takes a batch for every step from a loader of TensorDataset .*give prepare every loader"
ALIKE = r"all 2 ranks compute the same gradients, step after step, .*Loop over what prepare returned"
OTHER_ORDER = r"epoch 1: the sampler of the loader 'loader' draws another order on rank 1 .*the same on every rank"
LATE = r"step 5: the script changed gradients .* on rank \d.*use --option combine=always"
UNUSED = r"step 1: parameter '(heads\.0|1)\.weight' has no gradient on rank \d.*or use all-reduce"
OTHER_DATA = (
    r"epoch \d: the data set of the loader 'loader' is not the same on ranks 0 and 1 .*the same seed on every rank"
)

REFUSED: Mapping[str, Mapping[tuple[str, ...], str]] = {
    "initialised anew": {("all-reduce",): DRIFT, SERVERS: IN_PLACE},
    "to other numbers and back": {("all-reduce", *SERVERS): CONVERTED, ("gossip",): MOVED},
    "parametrised late": {SERVERS: NO_GRADIENT},
    "small weights to zero": {SERVERS: IN_PLACE},
    "another optimizer": {EVERYWHERE: r"SGD steps the parameter '1\.weight' .*give prepare every .*make it before"},
    "state forgotten": {SERVERS: STATE},
    "state cleared": {SERVERS: STATE},
    "a parameter dropped": {SERVERS: r"the optimizer has no parameter '3\.bias' any more.*or use all-reduce"},
    "a group added": {EVERYWHERE: r"the optimizer trains parameter that is not of the model.*before prepare"},
    "step wrapped before": {SERVERS: r"another function in the place of SGD\.step.*or use all-reduce"},
    "an attribute of the optimizer": {SERVERS: ATTRIBUTE},
    "an attribute of the optimizer, after": {SERVERS: ATTRIBUTE},
    "zeroed before the step": {SERVERS: NO_GRADIENT},
    "a layer left out": {SERVERS: NO_GRADIENT},
    "two passes at once": {EVERYWHERE: TWO_PASSES},
    "a pass within a pass": {EVERYWHERE: TWO_PASSES},
    "split already": {EVERYWHERE: r"already has a DistributedSampler; prepare divides the data itself: remove it"},
    "collation that filters": {(*JOINT, *ALONE): FILTERS},
    "ends alone": {(*JOINT, *ALONE): TOGETHER},
    "averaged weights, swapped in": {SERVERS: IN_PLACE},
    "clipped in a hook": {JOINT: HOOK},
    "clipped in a hook, before": {JOINT: HOOK},
    "clipped in a hook, later": {JOINT: HOOK},
    "clipped in a hook after": {JOINT: HOOK},
    "normalised in a hook": {JOINT: HOOK},
    "noise on gradients": {("all-reduce",): DRIFT, ("ps-bsp",): OWN_CHANGE},
    "gradients by own loss": {("all-reduce",): DRIFT, ("ps-bsp",): OWN_CHANGE},
    "one layer's gradients set": {("all-reduce",): DRIFT, ("ps-bsp",): OWN_CHANGE},
    "a sum by ones": {JOINT: SUM},
    "converted in the loop": {("all-reduce", *SERVERS): CONVERTED, ("gossip",): MOVED},
    "converted after prepare": {("all-reduce", *SERVERS): CONVERTED, ("gossip",): MOVED},
    "a new head": {("all-reduce",): DRIFT, SERVERS: NO_GRADIENT.replace("1", "3")},
    "a group of its own": {SERVERS: r"parameter '3\.bias' is in the optimizer's group 1 now.*or use all-reduce"},
    "a rate by own loss": {(*JOINT, *ALONE): RATE},
    "kept and read": {("local-sgd",): RATE},
    "momentum forgotten": {SERVERS: STATE},
    "trained by hand": {JOINT: DRIFT},
    "lookahead": {SERVERS: r"servers cannot build Lookahead .* attribute '\w+' holds tensors.*or use all-reduce"},
    "a shard of its own": {EVERYWHERE: OTHER_DATA},
    "shuffled in place": {EVERYWHERE: OTHER_DATA},
    "shuffled in place, later": {EVERYWHERE: OTHER_DATA},
    "nothing of some batches": {(*JOINT, *ALONE): TOGETHER},
    "another loader beside": {EVERYWHERE: BESIDE},
    "another loader beside, two steps a batch": {EVERYWHERE: rf"{BESIDE}|every rank must step alike"},
    "heads in turns": {SERVERS: UNUSED},
    "shared after": {(*SERVERS, "gossip"): MOVED},
    "through a vector": {(*SERVERS, "gossip"): MOVED},
    "rate found inside": {SERVERS: r"rank \d loads its optimizer's state after the first batch.*or use all-reduce"},
    "decayed by hand, later": {("ps-bsp",): LATE},
    "clipped by own loss": {("all-reduce",): DRIFT, ("ps-bsp",): LATE},
    "head alone": {SERVERS: UNUSED},
    "weights perturbed": {("all-reduce",): PASS, SERVERS: IN_PLACE},
    "weighted by own losses": {EVERYWHERE: OTHER_ORDER},
    "own labelled anew": {EVERYWHERE: OTHER_DATA},
    "loaders made anew": {EVERYWHERE: BESIDE},
    "loaders made anew, later": {EVERYWHERE: BESIDE},
    "small ones left out, some": {(*JOINT, *ALONE): TOGETHER},
    "bad ones left out": {(*JOINT, *ALONE): TOGETHER},
    "losses of several batches, with a tail": {(*JOINT, *ALONE): JOINED},
    "losses of two batches, with a tail": {(*JOINT, *ALONE): JOINED},
    "the one before in one loss": {(*JOINT, *ALONE): JOINED},
    "in parts, in one loss": {(*JOINT, *ALONE): JOINED},
    "with a copy of the one before in one loss": {(*JOINT, *ALONE): JOINED},
    "losses first, outputs of a closed class": {(*JOINT, *ALONE): NOT_TOLD},
    "stops early": {(*JOINT, *ALONE): TOGETHER},
    "back to the best": {("all-reduce",): DRIFT, SERVERS: IN_PLACE},
    "the first rank alone": {(*JOINT, *ALONE): TOGETHER},
    "kept and clamped": {SERVERS: IN_PLACE},
    "a part kept and clamped": {SERVERS: IN_PLACE},
    "in a vector from before": {(*SERVERS, "gossip"): r"holds a tensor of shape \[\d+\].* '\d.\w+'.*or use all-reduce"},
    "others loaded": {SERVERS: IN_PLACE},
    "a sum by a loop over outputs": {JOINT: LOOP},
    "a sum by Python": {JOINT: LOOP},
    "weighed terms": {JOINT: LOOP},
    "an actor and a critic": {JOINT: LOOP},
    "sums added": {JOINT: SUM_BY_HAND},
    "a sum of the second optimizer's": {JOINT: SUM_BY_HAND},
    "sums from the second epoch on": {JOINT: SUM_OF_TORCH},
    "sums in mid-epoch": {JOINT: SUM_OF_TORCH},
    "a sum by einsum": {JOINT: r"rank \d: the loss is a sum over the batch \(einsum\(\) or bmm\(\)\).*take the mean"},
    "others' outputs in the loss": {(*SERVERS[1:], *ALONE): SAME_STEP},
}
RANDOM = ("initialised anew", "noise on gradients", "a new head")
"""What these draw is each rank's own."""
DIVIDED = ("a masked mean", "weighed by hand", "weighed by torch")
"""By what each worker's own batch weighs: told where workers average such losses."""
BENT = r"the loss is a function of sums or means over the batch that is not linear, or compares its samples"
TOLD = {
    "a quotient of sums": BENT,
    "the worst group": BENT,
    "the largest losses": BENT,
    "views told apart": BENT,
    "features made apart": BENT,
    "the mean prediction": BENT,
    "those at risk": BENT,
    "half a sum": r"the loss, or a term of it, is 0\.5 times a sum over the batch",
    "half a sum beside a mean": r"the loss, or a term of it, is 0\.5 times a sum over the batch",
    "a factor of its own": r"the loss at .* is multiplied by a number of each worker's own",
}
"""Losses that each worker has of its own batch: told where workers average gradients."""
OWN = ("augmented at random", "tensors beside", "tensors in turns", "others' outputs in the loss", *DIVIDED, *TOLD)
"""What docs/script.md says to be each worker's own."""
QUICK = (
    "weighted by own losses",
    "own labelled anew",
    "kept with a tail",
    "chunks twice",
    "the one before again",
    "losses first, outputs of a closed class",
    "loaders made anew",
    "state forgotten",
    "a parameter dropped",
    "step wrapped before",
    "two passes at once",
    "collation that filters",
    "averaged weights, in the end",
    "clipped in a hook, later",
    "gradients by own loss",
    "converted in the loop",
    "momentum forgotten",
    "a group of its own",
    "a rate by own loss",
    "shuffled in place, later",
    "another loader beside",
    "kept and read",
    "a sum by a loop over outputs",
    "weighed by gradients",
    "others' outputs in the loss",
)
SCRIPTS = odd_hunted.SCRIPTS | odd_habits.SCRIPTS | odd_recipes.SCRIPTS | odd_data.SCRIPTS
SCRIPTS |= odd_batches.SCRIPTS | odd_weights.SCRIPTS | odd_losses.SCRIPTS


def refusal(strategy: str, name: str) -> str | None:
    return next((says for where, says in REFUSED.get(name, {}).items() if strategy in where), None)


def case(engine: str, strategy: str, name: str, is_chosen: bool) -> Any:
    is_quick = (engine, strategy) == ("virtual", "ps-bsp") and name in QUICK
    by_own = (*DIVIDED, "collation that filters")
    # Ranks that slice the same tensors are warned, and those that divide by their own; all others must not be.
    told = {"tensors in turns": ALIKE}
    if strategy in JOINT:
        told |= dict.fromkeys(by_own, OWN_DIVISOR) | TOLD
    ignored = [pytest.mark.filterwarnings(f"ignore:{told[name]}")] if name in told else []
    marks = [*ignored, *left_to(is_quick=is_quick, is_chosen=is_chosen)]
    return pytest.param(engine, strategy, name, id=f"{engine}-{strategy}-{name}", marks=marks)


def cases() -> list[Any]:
    """Virtually under a strategy of each family. In processes, where only the way of the bytes is another, every third
    script under one of three strategies; the others are left to `make test-products`."""
    virtually = [case("virtual", *chosen) for chosen in covering(SCRIPTS, FAMILIES, refusal)]
    thirds = set(list(SCRIPTS)[::3])
    apart = [
        case("processes", strategy, name, is_chosen and name in thirds)
        for strategy, name, is_chosen in covering(SCRIPTS, [(*JOINT, "gossip")])
    ]
    return [*virtually, *apart]


@pytest.mark.parametrize(("engine", "strategy", "name"), cases())
@pytest.mark.filterwarnings("ignore:all 2 ranks compute the same gradients")
@pytest.mark.filterwarnings("ignore:after its last step the script changed parameter")
@pytest.mark.filterwarnings("ignore:rank .* all_gather of a tensor that requires a gradient")
def test_hunted_scripts(engine: str, strategy: str, name: str, tmp_path: Path) -> None:
    is_own = name in OWN and not (name in (*DIVIDED, *TOLD) and strategy not in JOINT)
    is_compared = not is_own and (strategy in JOINT or name not in RANDOM)
    judge(SCRIPTS[name], engine, strategy, refusal(strategy, name), tmp_path, is_compared=is_compared)


@pytest.mark.slow
def test_gossip_over_processes_says_who_has_ended_alone(tmp_path: Path) -> None:
    says = "UsageError: the script of rank 1 has ended after 5 steps on 5 batches, and that of another rank has not: "
    script = partial(launched, SCRIPTS["ends alone"])
    with pytest.raises(RunFailed, match=says):
        local_engine.run(script, strategy="gossip", options=STRATEGIES["gossip"], workers=2, out=tmp_path)


def in_pairs(items: list[Any]) -> list[Tensor]:
    """A row of each two samples; of an odd number the last is alone."""
    pairs = [items[start : start + 2] for start in range(0, len(items), 2)]
    return [torch.stack([pair[-1][place] for pair in pairs]) for place in range(3)]


def test_a_collation_that_makes_a_row_of_each_pair_leaves_nothing_out(tmp_path: Path) -> None:
    def loader(worker: Any) -> DataLoader[Any]:
        return DataLoader(samples(30), batch_size=BATCH_SIZE, collate_fn=in_pairs)

    script = partial(launched, partial(odd_hunted.train, loader=loader))
    assert virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path).iteration == 8


def test_data_may_differ_by_rank_where_that_is_said(tmp_path: Path) -> None:
    def loader(worker: Any) -> DataLoader[Any]:
        found = odd_habits.own_shard(worker)
        found.dataset.differs_by_rank = True  # type: ignore[attr-defined]
        return found

    script = partial(launched, partial(odd_hunted.train, loader=loader))
    assert virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path).iteration == 12


@pytest.mark.parametrize("more", [odd_habits.shared_out, odd_habits.all_for_each])
def test_another_loader_beside_may_be_each_workers_own(more: Any, tmp_path: Path) -> None:
    def script(worker: Any) -> torch.nn.Module:
        return odd_hunted.train(worker, way=partial(odd_habits.beside, more=partial(more, worker)))

    assert virtual_engine.run(partial(launched, script), strategy="all-reduce", workers=2, out=tmp_path).iteration > 3


def with_loader_workers(worker: Any) -> DataLoader[Any]:
    return DataLoader(odd_habits.Shard(worker.rank, worker.size), batch_size=BATCH_SIZE, num_workers=1)


def test_data_that_loader_workers_alone_read_are_compared(tmp_path: Path) -> None:
    script = partial(launched, partial(odd_hunted.train, loader=with_loader_workers))
    with pytest.raises(RunFailed, match=f"(?s){OTHER_DATA}"):
        virtual_engine.run(script, strategy="ps-bsp", workers=2, out=tmp_path)


def test_ranks_that_train_on_the_same_data_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=ALIKE):
        virtual_engine.run(
            partial(launched, SCRIPTS["tensors in turns"]), strategy="all-reduce", workers=2, out=tmp_path
        )


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("strategy", ["all-reduce", pytest.param("ps-bsp", marks=pytest.mark.slow)])
def test_a_mean_by_what_each_ranks_own_batch_weighs_is_told(strategy: str, name: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the loss at odd_losses\.py:\d+ .*worker\.all_reduce_tree"):
        virtual_engine.run(partial(launched, SCRIPTS[name]), strategy=strategy, workers=2, out=tmp_path)


@pytest.mark.parametrize("name", TOLD)
def test_a_loss_that_is_no_mean_of_samples_is_told_in_the_scripts_line(name: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=TOLD[name]) as told:
        virtual_engine.run(partial(launched, SCRIPTS[name]), strategy="all-reduce", workers=2, out=tmp_path)
    assert {Path(each.filename).name for each in told if "the loss" in str(each.message)} == {"odd_losses.py"}


class Constant(Dataset[Any]):
    """As benchmarks have it."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return torch.ones(1, 8, 8, dtype=torch.float64), 1


def test_data_that_are_all_alike_may_give_the_same_gradients(tmp_path: Path) -> None:
    def loader(worker: Any) -> DataLoader[Any]:
        return DataLoader(Constant(), batch_size=BATCH_SIZE)

    script = partial(launched, partial(odd_hunted.train, loader=loader))
    assert virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path, strict=True).iteration == 12


def test_gradients_may_be_the_same_where_that_is_said(tmp_path: Path) -> None:
    def loader(worker: Any) -> DataLoader[Any]:
        found = DataLoader(samples(), batch_size=BATCH_SIZE)
        found.dataset.differs_by_rank = True  # type: ignore[attr-defined]
        return found

    def ones(batches: Any) -> Any:
        return ((torch.ones_like(x), torch.ones_like(y)) for x, y, _ in batches)

    script = partial(launched, partial(odd_hunted.train, loader=loader, way=ones))
    assert virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path, strict=True).iteration == 24


@pytest.mark.parametrize("reads_first", [False, True])
def test_records_count_batches_that_a_script_has_kept(reads_first: bool, tmp_path: Path) -> None:
    script = partial(launched, partial(odd_data.kept_with_tail, reads_first=reads_first))
    result = virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path)
    assert sum(step.samples for step in result.steps) == 2 * 91


def test_a_change_right_before_an_evaluation_is_not_undone(tmp_path: Path) -> None:
    def script() -> None:
        worker = paceline.init()
        worker.evaluation(lambda model: {"norm": float(sum(p.norm() for p in model.parameters()))})

        def halve(run: odd_hunted.Run) -> None:
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.mul_(0.5)

        odd_hunted.train(worker, prepared=halve)

    with pytest.raises(RunFailed, match=IN_PLACE):
        virtual_engine.run(script, strategy="ps-bsp", workers=1, out=tmp_path, eval_every="5")


def test_a_hook_that_only_looks_is_called_once_a_gradient(tmp_path: Path) -> None:
    def script() -> None:
        seen: list[float] = []
        watch = partial(odd_habits.add_hooks, hook=lambda gradient: seen.append(float(gradient.norm())))
        steps: list[int] = []
        odd_hunted.train(paceline.init(), prepared=watch, stepped=lambda run: steps.append(run.number))
        assert len(seen) == 4 * len(steps)

    assert virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path).iteration == 24


def test_who_sets_gradients_is_told_that_they_are_averaged(tmp_path: Path) -> None:
    script = partial(launched, partial(odd_habits.own_loop, step=set_gradients))
    with pytest.warns(UserWarning, match=r"rank 0: the script sets the gradient of '1\.weight'.*call loss\.backward"):
        virtual_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path)


@pytest.mark.parametrize("strategy", ["ps-asp", "ps-ssp"])
def test_what_an_asynchronous_run_leaves_out_of_its_model_is_told(strategy: str, tmp_path: Path) -> None:
    script = partial(launched, odd_habits.restore_best)
    told = r"after its last step the script changed parameter '1\.weight' on rank 0; the run's model is the servers'"
    with pytest.warns(UserWarning, match=told):
        virtual_engine.run(script, strategy=strategy, workers=2, out=tmp_path)


@pytest.mark.parametrize("strategy", ["ps-asp", "ps-ssp", "gossip", "local-sgd", "async-diloco"])
def test_what_no_optimizer_trains_has_its_mean_in_the_model(strategy: str, tmp_path: Path) -> None:
    def script(worker: Any) -> torch.nn.Module:
        def climb(run: odd_hunted.Run) -> None:
            with torch.no_grad():
                run.model[3].bias += 1.0 + worker.rank  # type: ignore[operator,index]

        def zero(run: odd_hunted.Run) -> None:
            torch.nn.init.zeros_(run.model[3].bias)  # type: ignore[index,arg-type]

        def few(parameters: Any) -> torch.optim.Optimizer:
            return SGD(list(parameters)[:3], lr=0.1)

        return odd_hunted.train(worker, optimizer=few, before=zero, stepped=climb)

    result = virtual_engine.run(partial(launched, script), strategy=strategy, workers=2, out=tmp_path)
    num_steps = [sum(step.worker == rank for step in result.steps) for rank in (0, 1)]
    climbed = result.model_state()["3.bias"]
    torch.testing.assert_close(climbed, torch.full_like(climbed, (num_steps[0] + 2.0 * num_steps[1]) / 2))
