"""Predicts clicks from 13 numbers and 26 categories, whose rows are on the servers.

    python recipes/embeddings/clicks.py
    paceline run recipes/embeddings/clicks.py --strategy ps-asp --workers 2 --option servers=2
    paceline run recipes/embeddings/clicks.py --strategy all-reduce --workers 2 --option servers=2 --option rows=asp
    python recipes/embeddings/clicks.py --file train.txt --held-out 100000

The model has the shape of DLRM (Naumov et al., "Deep learning recommendation model for personalization and
recommendation systems", 2019): a net makes a vector of the numbers, each category has a vector, and another net sees
the products of every two of them. Besides, each category adds a weight of its own to the logit, as in factorisation
machines (Rendle, "Factorization machines", ICDM 2010).
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from criteo import MOST_SHARED, NUM_COLUMNS, NUM_COUNTS, NUM_KEYS, Clicks, Lines, parse, shared
from planted_clicks import PlantedClicks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.nn import Adagrad, ShardedEmbedding, read_ahead

ROWS = Adagrad(lr=0.1, initial=0.01)
STD = 0.01
"""Of the rows at first."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="clicks in Criteo's format, instead of planted ones")
    parser.add_argument("--lines", type=int, default=60_000, help="how many are planted")
    parser.add_argument("--held-out", type=int, default=10_000, help="the first lines, which are not trained on")
    parser.add_argument("--rows", type=int, help="have categories share so many rows (default: each has its own)")
    parser.add_argument("--dense", action="store_true", help="these rows are a parameter, of which each worker has all")
    parser.add_argument("--dim", type=int, default=4, help="elements of a category's vector")
    parser.add_argument("--optimizer", help=f"of the rows in a table (default {ROWS})")
    parser.add_argument("--lr", type=float, default=0.01, help="of what is no row")
    parser.add_argument("--batch-size", type=int, default=256, help="lines a step")
    parser.add_argument("--ahead", action="store_true", help="rows of the next lines come while a step is computed")
    parser.add_argument("--passes", type=int, default=1, help="over all lines")
    args = parser.parse_args()
    if args.rows is not None and not 0 < args.rows <= MOST_SHARED:
        parser.error(f"--rows {args.rows}: from 1 to {MOST_SHARED}")
    if args.dense and (args.rows is None or args.optimizer):
        parser.error("--dense needs --rows N, and has no --optimizer of its own")
    if args.dense and args.ahead:
        parser.error("--ahead: with --dense each worker has all rows")
    if args.held_out < 1:
        parser.error(f"--held-out {args.held_out}: at least one line, to judge the model by")
    if args.file is None and args.lines <= args.held_out:
        parser.error(f"--lines {args.lines}: more than --held-out {args.held_out}, or none are left to train on")
    return args


class DenseRows(nn.EmbeddingBag):
    """What a table is on servers, as a parameter."""

    def __init__(self, num_rows: int, dim: int) -> None:
        super().__init__(num_rows, dim, mode="sum")
        nn.init.normal_(self.weight, std=STD)

    def bag(self, keys: Tensor, offsets: Tensor, mode: str) -> Tensor:
        return self(keys, offsets)


class ClickModel(nn.Module):
    def __init__(self, dim: int, rows: ShardedEmbedding | DenseRows, *, num_rows: int | None = None) -> None:
        super().__init__()
        self.num_rows, self.rows = num_rows, rows
        self.numbers = nn.Sequential(nn.Linear(NUM_COUNTS, 32), nn.ReLU(), nn.Linear(32, dim))
        num_products = (NUM_COLUMNS + 1) * NUM_COLUMNS // 2
        self.top = nn.Sequential(nn.Linear(num_products + dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, counts: Tensor, keys: Tensor, offsets: Tensor) -> Tensor:
        """Logits of shape (batch,)."""
        rows = self.rows.bag(self.own(keys), offsets, mode="sum").view(len(counts), NUM_COLUMNS, -1)
        numbers = self.numbers(counts)
        vectors = torch.cat([numbers.unsqueeze(1), rows[:, :, :-1]], dim=1)
        first, second = torch.triu_indices(NUM_COLUMNS + 1, NUM_COLUMNS + 1, offset=1)
        products = (vectors @ vectors.mT)[:, first, second]
        logits: Tensor = self.top(torch.cat([numbers, products], dim=1))[:, 0]
        return logits + rows[:, :, -1].sum(dim=1)

    def own(self, keys: Tensor) -> Tensor:
        """Of its rows, for categories with these keys."""
        return keys if self.num_rows is None else shared(keys, self.num_rows)


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    if args.file is None:
        drawn = list(PlantedClicks().draw(args.lines))
        source: Path | list[str] = [each.text for each in drawn]
        planted = sum(each.log_loss for each in drawn[: args.held_out]) / args.held_out
    else:
        source, planted = args.file, None
        if next(iter(Lines(source, begin=args.held_out)), None) is None:
            raise ValueError(f"{source}: --held-out {args.held_out} leaves no lines to train on")
    collate = partial(parse, source=args.file or "planted clicks")
    held_out = list(DataLoader(Lines(source, end=args.held_out), 1_000, collate_fn=collate))
    if args.dense:
        model = ClickModel(args.dim, DenseRows(args.rows, args.dim + 1), num_rows=args.rows)
    else:
        rule, num_rows = args.optimizer or ROWS, args.rows or NUM_KEYS
        table = ShardedEmbedding(num_rows, args.dim + 1, optimizer=rule, name="categories", std=STD)
        model = ClickModel(args.dim, table, num_rows=args.rows)
    optimizer = optimizer_of(model, args.lr)
    loader = DataLoader(Lines(source, begin=args.held_out), args.batch_size, collate_fn=collate)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)

    @worker.evaluation
    def judge(model: nn.Module) -> dict[str, float]:
        log_loss = mean_log_loss(model, held_out)
        if planted is None:
            return {"log_loss": log_loss}
        return {"log_loss": log_loss, "excess": log_loss / planted - 1}  # over the planted model's

    for _ in range(args.passes):
        batches = read_ahead(loader, lambda clicks: [(model.rows, model.own(clicks.keys))]) if args.ahead else loader
        for labels, *seen in batches:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(*seen), labels)
            loss.backward()
            optimizer.step()
            worker.log(loss=loss)


def optimizer_of(model: ClickModel, lr: float) -> torch.optim.Optimizer:
    """Of all parameters; rows that are among them are updated as those of a table."""
    nets = [*model.numbers.parameters(), *model.top.parameters()]
    dense = list(model.rows.parameters())
    groups = [{"params": nets}, *([{"params": dense, "lr": ROWS.lr}] if dense else [])]
    optimizer = torch.optim.Adagrad(groups, lr)
    for weight in dense:
        optimizer.state[weight]["sum"].fill_(ROWS.initial)
    return optimizer


def mean_log_loss(model: nn.Module, batches: Sequence[Clicks]) -> float:
    losses = [F.binary_cross_entropy_with_logits(model(*seen), labels, reduction="sum") for labels, *seen in batches]
    return float(torch.stack(losses).sum()) / sum(len(batch.labels) for batch in batches)


if __name__ == "__main__":
    main()
