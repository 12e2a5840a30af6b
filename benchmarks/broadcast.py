"""What it costs to give every host the first one's initial parameters: ResNet-18's, and one copy's time to beat.

Hosts are network namespaces on this machine (Linux and root needed; see namespaces.py), with a rank each. The model's
tensors go as `worker.prepare` sends them, all as one along a chain of hosts, and as gloo sends them down its binomial
tree: each with a call of its own, and all as one. Ranks begin together; the time is that until the last one has
everything, also in copies: times the model's bytes over the link's rate.

    sudo python benchmarks/broadcast.py --hosts 2 4 8 --rates 100
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from namespaces import Network, network
from peers.workload import make_model
from report import tell
from rich.table import Table
from torch import nn

from paceline.comm.process_group.collective import TorchCollective, connect_gloo
from paceline.strategies.replica import copy_from_first

CONTENDERS = ("a call a tensor", "one tensor, tree", "one tensor, chain")
STORE_PORT = 29555
TIMEOUT_S = 600.0
SETTLE_S = 1.0
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0], metavar="MBIT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs=2, help=argparse.SUPPRESS)  # the store's, and this rank's
    args = parser.parse_args()
    if args.rank is not None:
        be_rank(args.rank, args.size, *args.addresses, contenders=args.only, num_rounds=args.rounds)
        return
    table = Table("Mbit/s", "hosts", "contender", "seconds", "lowest to highest", "copies")
    results = []
    for num_hosts in args.hosts:
        with network(num_hosts) as net:
            for rate_mbit in args.rates:
                net.limit(rate_mbit)
                one_copy_s = seconds_of_one_copy(rate_mbit)
                times_s = measure(net, args.only, num_rounds=args.rounds)
                for name, values in times_s.items():
                    median_s, spread = statistics.median(values), f"{min(values):.2f} to {max(values):.2f}"
                    row = (f"{rate_mbit:g}", str(num_hosts), name, f"{median_s:.2f}", spread)
                    table.add_row(*row, f"{median_s / one_copy_s:.2f}")
                    results.append([*row, values])
    tell([table], {"rows": results})


def seconds_of_one_copy(rate_mbit: float) -> float:
    """Of the model's bytes at the link's rate."""
    model = make_model("resnet18")
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return num_bytes * 8 / (rate_mbit * 1e6)


def measure(net: Network, contenders: list[str], *, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, from when all have begun until the last one is done."""
    first, size = net.hosts[0].address, len(net.hosts)
    common = [sys.executable, str(HERE / "broadcast.py"), "--size", str(size), "--rounds", str(num_rounds)]
    common += ["--only", *contenders]
    commands = {
        host: [*common, "--rank", str(rank), "--addresses", first, host.address] for rank, host in enumerate(net.hosts)
    }
    said = [json.loads(output) for output in net.run_all(commands, timeout_s=TIMEOUT_S)]
    return {
        name: [
            max(theirs[name][number][1] for theirs in said) - min(theirs[name][number][0] for theirs in said)
            for number in range(num_rounds)
        ]
        for name in contenders
    }


def be_rank(rank: int, size: int, first: str, own: str, *, contenders: list[str], num_rounds: int) -> None:
    """On a host: take part in all broadcasts; prints when each began and ended here, on the machine's clock."""
    torch.set_num_threads(1)
    store = dist.TCPStore(first, STORE_PORT, size, rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    collective = connect_gloo(store, rank=rank, size=size, address=own, deadline_s=TIMEOUT_S)
    model = make_model("resnet18")
    times_s: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name in contenders:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(rank)
            collective.barrier()
            time.sleep(SETTLE_S)  # token buckets are full again
            collective.barrier()
            began_s = time.monotonic()
            SENDING[name](model, collective)
            times_s[name].append((began_s, time.monotonic()))
            assert all(not parameter.any() for parameter in model.parameters()), "not the first rank's"
    collective.barrier()
    print(json.dumps(times_s))
    collective.close()


def a_call_a_tensor(model: nn.Module, collective: TorchCollective) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        down_the_tree(tensor.detach().view(-1), collective)


def one_down_the_tree(model: nn.Module, collective: TorchCollective) -> None:
    tensors = [tensor.detach().view(-1).view(torch.uint8) for tensor in (*model.parameters(), *model.buffers())]
    whole = torch.cat(tensors)
    down_the_tree(whole, collective)
    for tensor, part in zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part)


def down_the_tree(flat: torch.Tensor, collective: TorchCollective) -> None:
    collective._group.broadcast([flat], dist.BroadcastOptions()).wait()


SENDING: dict[str, Callable[[nn.Module, TorchCollective], None]] = dict(
    zip(CONTENDERS, (a_call_a_tensor, one_down_the_tree, copy_from_first), strict=True)
)


if __name__ == "__main__":
    main()
