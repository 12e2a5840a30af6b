"""Rounds to a test accuracy beside those of McMahan et al., AISTATS 2017, on MNIST. One table a command.

    python recipes/federated/mcmahan.py table-1
    python recipes/federated/mcmahan.py table-2

Table 1 is the perceptron to 97 %, with batches of 10 and one pass a turn; table 2 the CNN to 99 %, with a tenth of the
clients in a round. There are 100 clients, whose data are drawn alike or are two shards each. Each cell has the best of
three rates, chosen by a seed that does not count, or the one of `--rates`. It is a study in `studies`, which goes on
where it was.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from paceline.lab.study import Study
from paceline.lab.variant import Variant

SCRIPT = Path(__file__).parents[1] / "mnist.py"
ALL = 600
"""A client's samples: a batch of them is all that it has."""


class Cell(NamedTuple):
    """One of a published table."""

    fraction: float
    epochs: int
    batch_size: int
    partition: str
    published: int
    """Rounds to the target."""
    rates: str = "0.05,0.1,0.2"

    @property
    def variant(self) -> Variant:
        return Variant.parse(
            f"fed-avg:clients=100:fraction={self.fraction:g}:epochs={self.epochs}:partition={self.partition}"
        )


class Published(NamedTuple):
    model: str
    target: str
    cells: tuple[Cell, ...]


TABLES = {
    "table-1": Published(
        "mlp",
        "accuracy=0.97",
        (Cell(0.1, 1, 10, "iid", 87), Cell(0.1, 1, 10, "shards", 664)),
    ),
    "table-2": Published(
        "fedavg-cnn",
        "accuracy=0.99",
        (
            Cell(0.1, 5, 10, "iid", 20),
            Cell(0.1, 1, 10, "iid", 34),
            Cell(0.1, 5, 50, "iid", 29, rates="0.1,0.2,0.3"),
            Cell(0.1, 1, ALL, "iid", 626, rates="0.1,0.13,0.16"),
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="cells by their number, from 1 on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="simulated processes that play the clients")
    parser.add_argument("--most", type=float, default=2.0, help="a run ends after so many times the published rounds")
    parser.add_argument("--rates", help="to choose from, with commas between; or one for all")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what clients compute with")
    parser.add_argument("--out", type=Path, default=Path("studies"))
    args = parser.parse_args()
    published = TABLES[args.table]
    cells = [cell for number, cell in enumerate(published.cells, 1) if args.only is None or number in args.only]
    table = Table("clients' part", "passes", "batch", "data", "rate", "rounds", "range", "published", title=args.table)
    for cell in cells:
        rates = args.rates or cell.rates
        rate = [] if "," in rates else ["--lr", rates]
        study = Study.run(
            SCRIPT,
            strategies=[cell.variant.text],
            workers=[args.workers],
            seeds=args.seeds,
            target=published.target,
            hold=1,
            eval_every="1iterations",
            tune=() if rate else [f"lr={rates}"],
            max_steps=int(args.most * cell.published),
            device=args.device,
            engine="virtual",
            cluster="lab-1gbe",
            arguments=["--model", published.model, "--batch-size", str(cell.batch_size), "--passes", "100000", *rate],
            out=args.out / "-".join(("mcmahan", args.table, *map(str, cell[:4]), rates)),
        )
        table.add_row(*row_of(cell, study, rates=rates))
    Console(width=110).print(table)


def row_of(cell: Cell, study: Study, *, rates: str) -> tuple[str, ...]:
    """Of runs that did not get there the table says how many. `rates`: to choose from, or one for all."""
    trials = study.frames.trials
    rounds = trials["iterations_to_target"]
    arrived = rounds.dropna()
    median = f"{rounds.median():.0f}" if len(arrived) == len(rounds) else f"{len(arrived)} of {len(rounds)} arrived"
    spread = f"{arrived.min():.0f} to {arrived.max():.0f}" if len(arrived) else ""
    batch = "all" if cell.batch_size == ALL else str(cell.batch_size)
    rate = ", ".join(sorted(set(trials["setting"]) - {""})) or f"lr={rates}"
    numbers = (f"{cell.fraction:g}", str(cell.epochs), batch, cell.partition)
    return (*numbers, rate, median, spread, str(cell.published))


if __name__ == "__main__":
    main()
