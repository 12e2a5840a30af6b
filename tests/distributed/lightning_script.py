"""A script for Lightning's Trainer, what runs of it find, and the same training without either."""

from __future__ import annotations

import copy
import importlib
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from tests.conformance import local_engine
from tests.conformance.local_engine import STOP_FILE

SAMPLES, GLOBAL_BATCH, EPOCHS = 64, 16, 3
PACKAGES = {"lightning.pytorch": "paceline.lightning", "pytorch_lightning": "paceline.lightning.pytorch_lightning"}


def made(package: str, *, manual: bool = False, step_logs: bool = False, asks_how_many: bool = False) -> Any:
    """A LightningModule as its user writes it."""
    from torchmetrics import MeanAbsoluteError

    pl = importlib.import_module(package)

    class Line(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            self.error = MeanAbsoluteError()

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = F.mse_loss(self.layers(x), y)
            self.log("loss", loss, sync_dist=True, on_step=step_logs, on_epoch=True)
            if manual:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.error(self.layers(x), y)
            self.log("error", self.error)
            self.log("val_loss", F.mse_loss(self.layers(x), y), sync_dist=True)

        def configure_optimizers(self) -> Any:
            first, _, last = self.layers
            if manual:
                return [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (first, last)]
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            if asks_how_many:
                steps = int(self.trainer.estimated_stepping_batches)
                scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]

    torch.manual_seed(0)
    return Line()


def validating_an_average(package: str) -> Any:
    """A callback that has the moving average of the weights validated, as users write it."""

    class Average(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.average = copy.deepcopy(module.state_dict())

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            for name, value in module.state_dict().items():
                self.average[name].lerp_(value, 0.3)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self.own = copy.deepcopy(module.state_dict())
            module.load_state_dict(self.average)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            module.load_state_dict(self.own)

    return Average()


def averaging(callbacks: Any, name: str) -> Any:
    """Lightning's own."""
    if name == "ema":
        return callbacks.EMAWeightAveraging(decay=0.7)
    return callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)


def interrupting(callbacks: Any, out: Path, step: int) -> Any:
    """As a batch system does when the job's time is over."""

    class Interrupt(callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == step:
                (out / STOP_FILE).touch()

    return Interrupt()


def data(samples: int = SAMPLES) -> TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


@torch.no_grad()
def loss_saved_in(checkpoint: Path) -> float:
    """Of the model of one of Lightning's checkpoints, over all data."""
    model = made("lightning.pytorch")
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    x, y = data()[:]
    return float(F.mse_loss(model.layers(x), y))


def fit(
    out: Path,
    settings: Mapping[str, Any],
    *,
    package: str = "lightning.pytorch",
    is_plain: bool = False,
    batch_size: int = GLOBAL_BATCH // 2,
    samples: int = SAMPLES,
    shuffle: bool = False,
    saves_every: int | None = None,
    resumes: Path | None = None,
    patience: int | None = None,
    asks_for: str | None = None,
    looks_at: str | None = None,
    averages: bool = False,
    average: str | None = None,
    stops_at: int | None = None,
    job: str | None = None,
    **module: Any,
) -> None:
    """The script of a run, or of one process without Paceline. What came out is in `found-RANK.json`."""
    if job is not None:
        os.environ |= {"SLURM_JOB_ID": job, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1"}
    pl = importlib.import_module(package)
    strategy = "auto" if is_plain else importlib.import_module(PACKAGES[package]).PacelineStrategy(asks_for)
    model, dataset = made(package, **module), data(samples)
    callbacks = pl.callbacks
    hooks = [] if patience is None else [callbacks.EarlyStopping("val_loss", patience=patience, min_delta=100.0)]
    if averages:
        hooks += [validating_an_average(package)]
    if average is not None:
        hooks += [averaging(callbacks, average)]
    if stops_at is not None:
        hooks += [interrupting(callbacks, out, stops_at)]
    if saves_every is not None:
        hooks += [callbacks.ModelCheckpoint(out, "{step}", save_top_k=-1, every_n_train_steps=saves_every)]
    more = {"max_epochs": EPOCHS, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(
        **{**more, "default_root_dir": out, **settings}, strategy=strategy, accelerator="cpu", callbacks=hooks
    )
    loaders = DataLoader(dataset, batch_size=batch_size, shuffle=shuffle), DataLoader(data(), batch_size=8)
    trainer.fit(model, *loaders, ckpt_path=resumes)
    fitted = dict(trainer.callback_metrics)
    trainer.save_checkpoint(out / "end.ckpt")
    (tested,) = trainer.validate(model, loaders[1], verbose=False)
    found = {
        "weights": [parameter.flatten().tolist() for parameter in model.parameters()],
        "metrics": {name: float(value) for name, value in (fitted | trainer.callback_metrics).items()},
        "tested": tested,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "looked_at": [],
        "world": [trainer.world_size, trainer.global_rank, trainer.node_rank, trainer.num_nodes],
    }
    if looks_at is not None:
        for path in (out / looks_at, None):
            found["looked_at"] += trainer.validate(model, loaders[1], ckpt_path=path, verbose=False)
    (out / f"found-{trainer.global_rank}.json").write_text(json.dumps(found))


def trained(out: Path, strategy: str, settings: Mapping[str, Any] | None = None, **script: Any) -> dict[str, Any]:
    run = {key: script.pop(key) for key in ("max_steps", "deadline_s") if key in script}
    workers = 1 if script.get("is_plain") else 2
    local_engine.run(partial(fit, out, settings or {}, **script), strategy=strategy, workers=workers, out=out, **run)
    return dict(json.loads((out / "found-0.json").read_text()))


def alone(out: Path, settings: Mapping[str, Any] | None = None, **script: Any) -> dict[str, Any]:
    """What Lightning makes of all workers' batches in one process."""
    return trained(out, "single", settings, is_plain=True, batch_size=GLOBAL_BATCH, **script)


def by_hand(out: Path) -> None:
    """The same training in a loop of Paceline's own."""
    worker = paceline.init()
    model = made("lightning.pytorch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = DataLoader(data(), batch_size=GLOBAL_BATCH // 2)
    model, optimizer, batches = worker.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model.layers(x), y).backward()
            optimizer.step()
        scheduler.step()
    with worker.global_model():
        torch.save({name: value.clone() for name, value in model.state_dict().items()}, out / f"hand-{worker.rank}.pt")
