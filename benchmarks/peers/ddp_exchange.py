"""The steps of exchange.py under PyTorch's DistributedDataParallel over gloo: one rank, on this host.

Prints the seconds of every step as JSON. Run on every host as
`python -m peers.ddp_exchange --rank R --size N --address IP-OF-RANK-0`, with GLOO_SOCKET_IFNAME set to the interface.
"""

from __future__ import annotations

import argparse
import json

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .exchange import GradientSource, make_step, time_steps

PORT = 29500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--address", required=True, help="of rank 0")
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    meeting_point = f"tcp://{args.address}:{PORT}"
    dist.init_process_group("gloo", init_method=meeting_point, rank=args.rank, world_size=args.size)
    try:
        step = make_step(DistributedDataParallel(GradientSource(args.model)))
        dist.barrier()
        print(json.dumps(time_steps(step, args.steps)))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
