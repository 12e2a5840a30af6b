"""What clients may leave out of what they send: 100 of them that keep their residuals, on MNIST.

    python benchmarks/clients.py

FedLab's setting (Zeng et al., JMLR 2023): Dirichlet 0.5, a tenth of the clients a round, five steps of 0.1 with all of
a client's samples, the perceptron of the FedAvg paper. Last comes what not to send: the largest of the weights
themselves, with 0 for the others (sparse_weights.py). It is a study in `studies`, which goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from report import tell
from rich.table import Table
from torch import Tensor

from paceline.codec.base import Payload, Shape, TensorCodec, doc
from paceline.codec.sparse import TopK
from paceline.lab.study import Study
from paceline.lab.variant import Variant

SCRIPT = Path(__file__).parents[1] / "recipes" / "mnist.py"
OF_WEIGHTS = Path(__file__).with_name("sparse_weights.py")
SETTING = "clients=100:fraction=0.1:epochs=5:partition=dirichlet:partition.alpha=0.5"
PLAIN = f"fed-avg:{SETTING}"
METHODS = {
    "all of the change": PLAIN,
    "QSGD, 4 bits": f"fed-avg:{SETTING}:codec=qsgd:codec.bits=4",
    "top 5 %, the rest kept": f"fed-avg:{SETTING}:optimizer=kept:codec=top-k:codec.ratio=0.05",
    "top 5 %, the rest forgotten": f"fed-avg:{SETTING}:codec=forgetful-top-k:codec.ratio=0.05",
}


@final
@dataclass(frozen=True, kw_only=True)
class ForgetfulTopK(TensorCodec, name="forgetful-top-k"):
    """Top-k without error feedback: what is left out is lost, as one should not do."""

    sparse: ClassVar[bool] = True
    contracts: ClassVar[bool] = True
    feedback: ClassVar[bool] = False
    seconds_per_gbyte: ClassVar[tuple[float, float]] = TopK.seconds_per_gbyte

    ratio: float = doc(0.01, "the part of the elements that is sent")

    def num_bytes(self, shape: Shape) -> int:
        return TopK(ratio=self.ratio).num_bytes(shape)

    def encode(self, tensor: Tensor, *, seed: int) -> Payload:
        return TopK(ratio=self.ratio).encode(tensor, seed=seed)

    def decode(self, payload: Sequence[Tensor], like: Tensor, *, seed: int) -> Tensor:
        return TopK(ratio=self.ratio).decode(tuple(payload), like, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("studies") / "clients")
    args = parser.parse_args()
    table = Table()
    table.add_column("sent")
    for title in ("accuracy", "range", "best"):
        table.add_column(title, justify="right")
    study = conduct(SCRIPT, list(METHODS.values()), args, out=args.out)
    for name, text in METHODS.items():
        table.add_row(name, *cells(study, text))
    weights = conduct(OF_WEIGHTS, [PLAIN], args, out=args.out.with_name(f"{args.out.name}-weights"))
    table.add_row("top 5 % of the weights", *cells(weights, PLAIN))
    tell([table], {"rounds": args.rounds, "seeds": args.seeds})


def conduct(script: Path, strategies: Sequence[str], args: argparse.Namespace, *, out: Path) -> Study:
    return Study.run(
        script,
        strategies=strategies,
        workers=[1],
        seeds=args.seeds,
        max_steps=args.rounds,
        eval_every=f"{max(1, args.rounds // 10)}iterations",
        engine="virtual",
        cluster="lab-1gbe",
        arguments=["--model", "mlp", "--lr", "0.1", "--batch-size", "60000", "--passes", str(args.rounds)],
        out=out,
        retry_failed=True,
    ).require_finished()


def cells(study: Study, strategy: str) -> tuple[str, str, str]:
    trials = study.frames.trials
    own = trials[trials["strategy"] == Variant.parse(strategy).text]
    last = own["last_metric"]
    spread = f"{last.min():.2%} to {last.max():.2%}" if len(own) > 1 else ""
    return f"{last.mean():.2%}", spread, f"{own['best_metric'].max():.2%}"


if __name__ == "__main__":
    main()
