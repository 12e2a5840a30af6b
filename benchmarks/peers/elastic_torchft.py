"""torchft: a replica that dies is missed by the next quorum, with which the others go on as they are.

Needs `pip install torchft`. Each worker is a replica group of its own, as torchft's own example of
DistributedDataParallel has them; nobody is started again. Run as
`python -m benchmarks.peers.elastic_torchft --workers 3 --directory DIRECTORY`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .deaths import Diary, last_step
from .workload import cycle_batches, make_model, make_optimizer, share_cores, train_step

TIMEOUT_S = 60.0


def train(rank: int, size: int, args: argparse.Namespace) -> None:
    """One replica, until as many steps are committed."""
    import torchft

    share_cores(size)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = make_model(args.model)
    plain = make_optimizer(model)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    def load(given: dict[str, Any]) -> None:
        model.load_state_dict(given["model"])
        plain.load_state_dict(given["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"replica-{rank}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        init_sync=False,
    )
    parallel: Any = torchft.DistributedDataParallel(manager, model)
    optimizer: Any = torchft.Optimizer(manager, plain)
    batches, diary = cycle_batches(args.batch_size, seed=rank), Diary(args.directory, rank, model)
    while (done := manager.current_step()) < last_step(size):
        diary.begin(done + 1)
        train_step(parallel, optimizer, next(batches))
        if manager.current_step() > done:
            diary.end(done + 1)
    manager.shutdown(wait=False)


def start(args: argparse.Namespace) -> None:
    """A lighthouse, and a process for each replica; until the first one, which nobody kills, is done."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=args.heartbeat_timeout_ms
    )
    module = ["-m", "benchmarks.peers.elastic_torchft", *sys.argv[1:], "--lighthouse", lighthouse.address()]
    replicas = [subprocess.Popen([sys.executable, *module, "--rank", str(rank)]) for rank in range(args.workers)]
    try:
        if replicas[0].wait():
            raise SystemExit("the first replica has failed")
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        lighthouse.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--heartbeat-timeout-ms", type=int, default=5000)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is None:
        start(args)
    else:
        train(args.rank, args.workers, args)


if __name__ == "__main__":
    main()
