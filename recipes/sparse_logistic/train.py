"""Logistic regression with an L1 penalty by delayed proximal gradient, on a key-value store.

    python recipes/sparse_logistic/train.py
    python recipes/sparse_logistic/train.py --staleness 2 --lr 2 --filter changed --filter kkt

Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, section 5.1: workers compute
gradients of their samples, servers make the proximal steps, workers may be some iterations ahead of each other, and
filters leave out what matters little. Here workers push by how much their gradient has changed, so that servers know
all workers' newest gradients, however late these are.
"""

import argparse

import torch
from samples import Samples, planted

from paceline import kv


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=5_000)
    parser.add_argument("--features", type=int, default=5_000)
    parser.add_argument("--l1", type=float, default=5e-4, help="weight of the penalty beside the mean loss")
    parser.add_argument("--lr", type=float, default=4.0, help="1 is safe without delays, whatever the data")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--staleness", type=int, default=0, help="iterations that a worker may be ahead of others")
    parser.add_argument("--filter", action="append", default=[], choices=["changed", "kkt"])
    return parser.parse_args()


def store_of(args: argparse.Namespace) -> kv.Spec:
    step = kv.Function("proximal:step", over_range=True, options={"lr": args.lr, "l1": args.l1})
    return kv.Spec(
        servers=args.servers,
        workers=args.workers,
        num_keys=args.features,
        state=2,
        dtype=torch.float64,
        functions={"step": step, "curve": kv.Function("proximal:curve")},
        rule="ssp" if args.staleness else "bsp",
        rule_options={"staleness": args.staleness} if args.staleness else {},
    )


def work(rank: int, group: kv.Group, args: argparse.Namespace) -> torch.Tensor:
    """One worker's part; returns the weights."""
    everything = planted(args.samples, num_features=args.features)
    own = everything.share(rank, args.workers)
    keys = own.features.unique()
    weights = torch.zeros(args.features, dtype=torch.float64)
    changed = kv.SignificantlyModified(0.0)
    with group.connect(rank) as store:
        store.wait(store.push(keys, own.curvature(args.features)[keys] / args.samples, function="curve"))
        store.barrier()
        for iteration in range(args.iterations):
            pulled = store.result(store.pull(keys)).values
            weights[keys] = pulled[:, 0]
            gradient = own.gradient(weights)[keys] / args.samples
            filters: list[kv.Filter] = [changed]
            if "changed" in args.filter:
                changed.threshold = 0.1 * args.l1 / args.workers / (1 + iteration)
            if "kkt" in args.filter and iteration % 10:  # every tenth has all, in case that others' gradients differ
                filters.insert(0, kv.kkt(pulled, l1=args.l1, scale=args.workers, margin=0.1 * args.l1))
            push = store.push(keys, gradient, function="step", filters=filters)
        store.wait(push)
        store.barrier()
        found = store.result(store.pull(range(args.features)))
        weights[found.keys] = found.values[:, 0]
        print(_summary(rank, everything, weights, args, store))
    return weights


def objective(samples: Samples, weights: torch.Tensor, l1: float) -> float:
    return samples.loss(weights) + l1 * float(weights.abs().sum())


def _summary(rank: int, samples: Samples, weights: torch.Tensor, args: argparse.Namespace, store: kv.Store) -> str:
    return (
        f"worker {rank}: objective {objective(samples, weights, args.l1):.6f}, {int(weights.count_nonzero())} weights "
        f"are not 0; {store.sent_bytes / 1e6:.1f} MB sent, {store.received_bytes / 1e6:.1f} MB received"
    )


if __name__ == "__main__":
    arguments = parse_arguments()
    with kv.serve(store_of(arguments)) as servers:
        torch.multiprocessing.spawn(work, args=(servers, arguments), nprocs=arguments.workers)
