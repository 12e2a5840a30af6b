"""Transformers' Trainer trains under Paceline's strategies as it trains by itself in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.errors import RunFailed, UsageError
from tests.conformance import local_engine
from tests.conformance.local_engine import STOP_FILE
from tests.covering import in_turns
from tests.forks import having_loaded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("transformers") is None, reason="Transformers is not installed (paceline[frameworks])"
    ),
]
SAMPLES, GLOBAL_BATCH, EPOCHS = 64, 16, 3
IGNORED = -100


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    with having_loaded("transformers.trainer", "paceline.transformers"):
        yield


class Samples(Dataset[dict[str, Tensor]]):
    """Rows with as many labels as ignored ones leave."""

    def __init__(self, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        self.x = torch.randn(number, 6, 4, generator=draw)
        self.labels = (self.x.sum(2) > 0).long()
        self.labels[torch.rand(number, 6, generator=draw) < 0.4] = IGNORED

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Tagger(nn.Module):
    """Its loss is a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten()), "logits": logits}


class TokenTagger(Tagger):
    """Its loss is a mean over the labelled tokens of all workers, as language models have it."""

    accepts_loss_kwargs = True

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.net(x)
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return {
            "loss": summed / ((labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch),
            "logits": logits,
        }


def accuracy(found: Any) -> dict[str, float]:
    is_labelled = found.label_ids != IGNORED
    return {"accuracy": float((found.predictions.argmax(2) == found.label_ids)[is_labelled].mean())}


def train(
    out: Path,
    *,
    is_plain: bool = False,
    model: type[nn.Module] = Tagger,
    samples: int = SAMPLES,
    batch_size: int = GLOBAL_BATCH // 2,
    resumes: Path | None = None,
    slows_rank: int | None = None,
    stops_at: int | None = None,
    **arguments: Any,
) -> None:
    """The script, with its one more line or without."""
    from transformers import Trainer, TrainingArguments

    losses = []

    class Own(Trainer):
        """As scripts have it that add something."""

        def training_step(self, *arguments: Any, **settings: Any) -> Tensor:
            loss = super().training_step(*arguments, **settings)
            losses.append([int(self.state.epoch or 0), float(loss)])
            if self.state.global_step == stops_at:
                (out / STOP_FILE).touch()
            return loss

    torch.manual_seed(0)
    settings = {
        "num_train_epochs": EPOCHS,
        "learning_rate": 0.05,
        "per_device_train_batch_size": batch_size,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "logging_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **arguments,
    }
    trainer = Own(
        model=model(),
        args=TrainingArguments(str(out / "trainer"), **settings),
        train_dataset=Samples(samples),
        eval_dataset=Samples(30),
        compute_metrics=lambda found: (
            accuracy(found) | {"sum": sum(float(each.sum()) for each in trainer.model.parameters())}
        ),
    )
    if not is_plain:
        from paceline.transformers import PacelineCallback

        trainer.add_callback(PacelineCallback(trainer))
    if trainer.args.process_index == slows_rank:
        trainer.model.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    trainer.train(resume_from_checkpoint=str(resumes) if resumes is not None else None)
    logged = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry]
    said = {
        "weights": [parameter.flatten().tolist() for parameter in trainer.model.parameters()],
        "found": [[entry["eval_accuracy"], entry["eval_sum"]] for entry in logged],
        "own_losses": losses,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
    }
    (out / f"found-{trainer.args.process_index}.json").write_text(json.dumps(said))


def trained(out: Path, strategy: str, *, max_steps: int | None = None, **script: Any) -> dict[str, Any]:
    workers = 1 if script.get("is_plain") else 2
    local_engine.run(partial(train, out, **script), strategy=strategy, workers=workers, out=out, max_steps=max_steps)
    return dict(json.loads((out / "found-0.json").read_text()))


def alone(out: Path, **script: Any) -> dict[str, Any]:
    return trained(out, "single", is_plain=True, batch_size=GLOBAL_BATCH, **script)


def in_order() -> dict[str, Any]:
    """Workers and one process take the same samples a step."""
    return {"train_sampling_strategy": "sequential"}


SGD = {"optim": "sgd", "lr_scheduler_type": "linear"}
SCRIPTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "accumulation": {"gradient_accumulation_steps": 2} | SGD,
    "clipping": {"max_grad_norm": 0.1} | SGD,
    "tokens": {"model": TokenTagger} | SGD,
}


@pytest.mark.parametrize(("strategy", "name"), in_turns(SCRIPTS, ["all-reduce", "ps-bsp:servers=2"]))
def test_workers_in_lock_step_train_what_one_process_trains(strategy: str, name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    found, expected = (
        trained(tmp_path / "two", strategy, **in_order(), **script),
        alone(tmp_path / "one", **in_order(), **script),
    )
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=1e-4)
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4)
    assert [accuracy for accuracy, _ in found["found"]] == [accuracy for accuracy, _ in expected["found"]]
    assert (found["steps"], found["epochs"]) == (expected["steps"], expected["epochs"])


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("ps-asp", TokenTagger),
        ("gossip", Tagger),
        ("local-sgd:every=2", Tagger),
        ("ad-psgd", Tagger),
        ("diloco:every=2", TokenTagger),
        ("async-diloco:every=3", TokenTagger),
        ("ps-bsp:backup_workers=1:combine=never", Tagger),
    ],
)
def test_workers_that_run_free_evaluate_the_same_model(strategy: str, model: type[nn.Module], tmp_path: Path) -> None:
    found = trained(tmp_path, strategy, model=model, save_strategy="epoch", **SGD)
    other = json.loads((tmp_path / "found-1.json").read_text())
    assert found["found"] == other["found"]
    assert len(found["found"]) == EPOCHS


@pytest.mark.parametrize(("strategy", "at"), [("all-reduce", 4), ("all-reduce", 6), ("ps-bsp", 6), ("gossip", 6)])
def test_a_resumed_run_equals_an_uninterrupted_one(strategy: str, at: int, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": at}
    whole = trained(tmp_path / "whole", strategy, **saving)
    saved = tmp_path / "whole" / "trainer" / f"checkpoint-{at}"
    resumed = trained(tmp_path / "resumed", strategy, resumes=saved, **saving)
    assert resumed["weights"] == whole["weights"]
    assert resumed["losses"][-1] == whole["losses"][-1]


def test_an_interrupted_run_saves_the_step_that_it_ends_at(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 100}
    whole = trained(tmp_path / "whole", "all-reduce", **saving)
    cut = trained(tmp_path / "cut", "all-reduce", stops_at=5, **saving)
    assert cut["steps"] < whole["steps"]
    saved = tmp_path / "cut" / "trainer" / f"checkpoint-{cut['steps']}"
    resumed = trained(tmp_path / "resumed", "all-reduce", resumes=saved, **saving)
    assert (resumed["weights"], resumed["steps"]) == (whole["weights"], whole["steps"])


def test_one_worker_trains_by_itself(tmp_path: Path) -> None:
    own, settings = tmp_path / "own", {"batch_size": GLOBAL_BATCH, **in_order()}
    local_engine.run(partial(train, own, **settings), strategy="single", workers=1, out=own)
    found, expected = json.loads((own / "found-0.json").read_text()), alone(tmp_path / "plain", **in_order())
    assert found["weights"] == expected["weights"]


ROUNDS = {"logging_strategy": "epoch", "save_strategy": "epoch", **SGD}


def tell_loss(out: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from paceline.transformers import PacelineCallback

    losses = []

    class Own(Trainer):
        def training_step(self, *arguments: Any, **settings: Any) -> Tensor:
            losses.append(loss := super().training_step(*arguments, **settings))
            return loss

    settings: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "no", "logging_strategy": "no", **SGD}
    settings |= {"num_train_epochs": 4, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
    data = Samples(SAMPLES)
    trainer = Own(Tagger(), TrainingArguments(str(out), **settings), train_dataset=data, eval_dataset=data)
    trainer.add_callback(PacelineCallback(trainer))
    found = trainer.train().training_loss
    assert found == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    with pytest.raises(UsageError, match="has a PacelineCallback already"):
        PacelineCallback(trainer)


def test_a_loss_of_rounds_that_nobody_logs_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    script = partial(tell_loss, tmp_path)
    local_engine.run(script, strategy="fed-avg:clients=6:fraction=0.5", workers=2, out=tmp_path / "out")


def test_an_epoch_is_a_round_of_clients(tmp_path: Path) -> None:
    """Of three clients a round one worker plays two, and both evaluate when the round is over."""
    found = trained(tmp_path, "fed-avg:clients=6:fraction=0.5", **ROUNDS)
    other = json.loads((tmp_path / "found-1.json").read_text())
    assert found["epochs"] == other["epochs"] == EPOCHS
    assert found["steps"] != other["steps"]
    assert found["steps"] + other["steps"] == EPOCHS * 3 * 2, "a client has two batches"
    assert found["found"] == other["found"]
    for number, said in enumerate(found["losses"]):
        losses = [loss for epoch, loss in found["own_losses"] + other["own_losses"] if epoch == number]
        assert said == pytest.approx(sum(losses) / len(losses), rel=1e-5), "the mean over the steps of both"
    saved = tmp_path / "trainer" / f"checkpoint-{found['steps']}"
    with pytest.raises(RunFailed, match="begin a new run from the weights"):
        trained(tmp_path / "resumed", "fed-avg:clients=6:fraction=0.5", resumes=saved, **ROUNDS)


def by_hand(out: Path) -> None:
    """The same rounds in a loop of Paceline's own."""
    from transformers import get_linear_schedule_with_warmup

    worker = paceline.init()
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Samples(SAMPLES), batch_size=GLOBAL_BATCH // 2, shuffle=True)
    model, optimizer, batches = worker.prepare(model, optimizer, loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, EPOCHS * SAMPLES // 4 // (GLOBAL_BATCH // 2))
    for _ in range(EPOCHS):
        for batch in batches:
            model.zero_grad()
            model(**batch)["loss"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    with worker.global_model():
        (out / f"hand-{worker.rank}.json").write_text(json.dumps(sum(float(each.sum()) for each in model.parameters())))


def test_rounds_train_what_a_loop_by_hand_trains(tmp_path: Path) -> None:
    strategy = "fed-avg:clients=4:fraction=0.5"
    found = trained(tmp_path, strategy, **ROUNDS)
    local_engine.run(partial(by_hand, tmp_path), strategy=strategy, workers=2, out=tmp_path)
    assert found["found"][-1][1] == json.loads((tmp_path / "hand-0.json").read_text())


def test_the_runs_budget_ends_the_script(tmp_path: Path) -> None:
    found = trained(tmp_path, "all-reduce", max_steps=10)
    assert found["steps"] == 10
    assert len(found["found"]) == EPOCHS


def test_a_budget_that_ends_workers_at_different_steps(tmp_path: Path) -> None:
    """They log, evaluate and save in one place, and one checkpoint has all."""
    settings = {"max_steps": 10, "logging_steps": 1000, "slows_rank": 0, "save_strategy": "epoch"}
    found = trained(tmp_path, "ps-asp", **settings, **SGD)
    other = json.loads((tmp_path / "found-1.json").read_text())
    assert found["steps"] < other["steps"]
    assert 10 <= found["steps"] + other["steps"] <= 12
    assert found["found"][-1] == other["found"][-1]
    directories = sorted((tmp_path / "trainer").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    names = {"paceline.bin", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"}
    assert all(names <= {path.name for path in directory.iterdir()} for directory in directories)
    assert directories[-1].name == f"checkpoint-{found['steps']}"


def test_tokens_are_not_averaged_where_a_batch_is_smaller_on_one_rank(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="dataloader_drop_last=True, or average_tokens_across_devices=False"):
        trained(tmp_path / "uneven", "all-reduce", model=TokenTagger, samples=61)
    trained(tmp_path / "own", "all-reduce", model=TokenTagger, samples=61, average_tokens_across_devices=False)


def train_without_its_end(out: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from paceline.transformers import PacelineCallback

    arguments = TrainingArguments(str(out), use_cpu=True, report_to=[])
    trainer = Trainer(model=Tagger(), args=arguments, train_dataset=Samples(SAMPLES))
    PacelineCallback(trainer)
    trainer.train()


def train_on_a_loader_of_its_own(out: Path, *, is_prepared: bool) -> None:
    from transformers import Trainer, TrainingArguments

    from paceline.transformers import PacelineCallback

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(self.train_dataset, batch_size=GLOBAL_BATCH // 2)
            return self.accelerator.prepare(loader) if is_prepared else loader

    settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "num_train_epochs": 1, "save_strategy": "no"}
    trainer = Own(model=TokenTagger(), args=TrainingArguments(str(out), **settings), train_dataset=Samples(SAMPLES))
    trainer.add_callback(PacelineCallback(trainer))
    trainer.train()
    (out / "steps").write_text(str(trainer.state.global_step))


def test_a_loader_of_the_trainers_own_is_divided_where_it_is_prepared(tmp_path: Path) -> None:
    script = partial(train_on_a_loader_of_its_own, tmp_path, is_prepared=True)
    local_engine.run(script, strategy="all-reduce", workers=2, out=tmp_path)
    assert (tmp_path / "steps").read_text() == str(SAMPLES // GLOBAL_BATCH)


@pytest.mark.parametrize(
    ("strategy", "script", "says"),
    [
        ("horovod", train, "the script itself exchanges, .* choose another strategy, such as all-reduce"),
        ("all-reduce", partial(train, auto_find_batch_size=True), "set per_device_train_batch_size"),
        ("ps-asp", partial(train, load_best_model_at_end=True, save_strategy="epoch"), "best_model_checkpoint"),
        ("fed-avg:clients=4:fraction=0.5", train, "a whole number of rounds"),
        ("fed-avg:clients=6:fraction=0.5:sampler=poisson", partial(train, **ROUNDS), "round 3 has no client for rank"),
        ("all-reduce", train_without_its_end, "trainer.add_callback"),
        (
            "all-reduce",
            partial(train_on_a_loader_of_its_own, is_prepared=False),
            r"self\.accelerator\.prepare\(loader\)",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(strategy: str, script: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=says):
        local_engine.run(partial(script, tmp_path), strategy=strategy, workers=2, out=tmp_path / "out")


def test_the_best_model_is_loaded_in_the_end(tmp_path: Path) -> None:
    script = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "save_strategy": "epoch", **SGD}
    found, expected = (
        trained(tmp_path / "two", "all-reduce", **in_order(), **script),
        alone(tmp_path / "one", **in_order(), **script),
    )
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=1e-4)
