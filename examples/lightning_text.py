"""Trains a text classifier with Lightning's Trainer, under any strategy.

    paceline run examples/lightning_text.py --strategy ps-asp --workers 2
    paceline run examples/lightning_text.py --strategy all-reduce --workers 2 -- --resume RUN/last.ckpt

Needs `pip install paceline[frameworks]`.
"""

import argparse
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from paceline.lightning import PacelineStrategy

sys.path.insert(0, str(Path(__file__).parent))
from sentences import NUM_TOPICS, NUM_WORDS, sentences


class Classifier(pl.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.words = nn.EmbeddingBag(NUM_WORDS, 16)
        self.topic = nn.Linear(16, NUM_TOPICS)
        self.accuracy = MulticlassAccuracy(NUM_TOPICS, average="micro")

    def forward(self, text: Tensor) -> Tensor:
        return self.topic(self.words(text))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        text, topic = batch
        loss = F.cross_entropy(self(text), topic)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        text, topic = batch
        logits = self(text)
        self.accuracy(logits, topic)
        self.log("accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(logits, topic), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--batch-size", type=int, default=32, help="sentences that each worker takes a step")
    parser.add_argument("--out", type=Path, default=Path("lightning-text"), help="where checkpoints go")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    arguments = parser.parse_args()
    best = pl.callbacks.ModelCheckpoint(arguments.out, monitor="val_loss", save_last=True)
    trainer = pl.Trainer(
        strategy=PacelineStrategy(),
        max_epochs=arguments.epochs,
        callbacks=[best, pl.callbacks.EarlyStopping("val_loss", patience=2)],
        logger=False,
        enable_progress_bar=False,
    )
    training = DataLoader(sentences(2048, seed=0), batch_size=arguments.batch_size, shuffle=True)
    testing = DataLoader(sentences(512, seed=1), batch_size=64)
    trainer.fit(Classifier(arguments.lr), training, testing, ckpt_path=arguments.resume)
    if trainer.is_global_zero:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f} on {trainer.world_size} workers")


if __name__ == "__main__":
    main()
