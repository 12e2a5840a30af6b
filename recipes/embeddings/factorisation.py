"""Predicts ratings by matrix factorisation, with a row of factors for every user and every item.

    python recipes/embeddings/factorisation.py
    paceline run recipes/embeddings/factorisation.py --strategy ps-asp --workers 2 --option servers=2 -- --passes 4
    python recipes/embeddings/factorisation.py --file ml-latest-small/ratings.csv

Ids are keys as they are: nobody counts users or numbers them anew (Koren, Bell and Volinsky, "Matrix factorization
techniques for recommender systems", Computer 2009; with weights for the products of factors, as in He et al., "Neural
collaborative filtering", WWW 2017, section 3.2).
"""

import argparse
from pathlib import Path

import torch
from ratings import Ratings, planted, read
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.nn import ShardedEmbedding


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="ratings in a format of MovieLens, instead of planted ones")
    parser.add_argument("--ratings", type=int, default=60_000, help="how many are planted")
    parser.add_argument("--users", type=int, default=1_000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--dim", type=int, default=16, help="factors of a user, and of an item")
    parser.add_argument("--optimizer", default="adagrad:lr=0.2", help="of the rows")
    parser.add_argument("--lr", type=float, default=0.01, help="of what is no row")
    parser.add_argument("--decay", type=float, default=0.05, help="of the rows of a batch")
    parser.add_argument("--batch-size", type=int, default=256, help="ratings a step")
    parser.add_argument("--passes", type=int, default=5, help="over all ratings")
    return parser.parse_args()


class Factorisation(nn.Module):
    """A rating is an affine function of the products of a user's and an item's factors, and of a bias of each."""

    def __init__(self, dim: int, optimizer: str, *, mean: float) -> None:
        super().__init__()
        self.users, self.items = (
            ShardedEmbedding(2**63, dim + 1, optimizer=optimizer, name=name, std=0.1) for name in ("users", "items")
        )
        self.weights = nn.Linear(dim, 1)
        nn.init.ones_(self.weights.weight)
        nn.init.constant_(self.weights.bias, mean)

    def forward(self, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions, and the mean square of the rows that made them."""
        user, item = self.users(users), self.items(items)
        predicted = self.weights(user[:, :-1] * item[:, :-1])[:, 0] + user[:, -1] + item[:, -1]
        return predicted, (user.square() + item.square()).sum(dim=1).mean()


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    ratings = read(args.file) if args.file else planted(args.ratings, users=args.users, items=args.items)
    train, held_out = ratings.split(0.1)
    model = Factorisation(args.dim, args.optimizer, mean=float(train.values.mean()))
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    loader = DataLoader(TensorDataset(*train), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)

    @worker.evaluation
    def error(model: nn.Module) -> dict[str, float]:
        return {"rmse": root_mean_squared_error(model, held_out)}

    for _ in range(args.passes):
        for users, items, values in loader:
            optimizer.zero_grad()
            predicted, size = model(users, items)
            loss = F.mse_loss(predicted, values)
            (loss + args.decay * size).backward()
            optimizer.step()
            worker.log(loss=loss)


def root_mean_squared_error(model: nn.Module, ratings: Ratings) -> float:
    predicted, _ = model(ratings.users, ratings.items)
    return float(F.mse_loss(predicted, ratings.values).sqrt())


if __name__ == "__main__":
    main()
