"""Trains a small transformer that classifies text with Transformers' Trainer, under any strategy.

    paceline run examples/trainer_text.py --strategy local-sgd:every=8 --workers 2

Needs `pip install paceline[frameworks]`. The model begins from random weights: nothing is downloaded.
"""

import argparse
import sys
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)

from paceline.transformers import PacelineCallback

sys.path.insert(0, str(Path(__file__).parent))
from sentences import LENGTH, NUM_TOPICS, NUM_WORDS, sentences


class Named(Dataset[dict[str, Tensor]]):
    """Rows as the model calls them."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text, topic = self.rows[index]
        return {"input_ids": text, "labels": topic}


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=int, default=32, help="sentences that each worker takes a step")
    parser.add_argument("--out", type=Path, default=Path("trainer-text"), help="where checkpoints go")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    arguments = parser.parse_args()
    config = DistilBertConfig(
        vocab_size=NUM_WORDS, max_position_embeddings=LENGTH, dim=32, n_layers=1, n_heads=2, hidden_dim=64
    )
    config.num_labels = NUM_TOPICS
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config),
        args=TrainingArguments(
            str(arguments.out),
            num_train_epochs=arguments.epochs,
            learning_rate=arguments.lr,
            per_device_train_batch_size=arguments.batch_size,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_steps=16,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Named(sentences(2048, seed=0)),
        eval_dataset=Named(sentences(512, seed=1)),
        compute_metrics=accuracy,
    )
    trainer.add_callback(PacelineCallback(trainer))  # the only line that is not Transformers'
    trainer.train(resume_from_checkpoint=str(arguments.resume) if arguments.resume else None)
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {found['eval_accuracy']:.3f} on {trainer.args.world_size} workers")


if __name__ == "__main__":
    main()
