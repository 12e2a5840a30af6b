"""One host's part in the Ray cluster of a batch job, as a program that takes ADDRESS, DIRECTORY and, unless SLURM tells
them, CORES."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event

from paceline.engines.ray import slurm
from paceline.engines.ray.local_directory import RAYS_OWN, same_directory

# Tensors never go through Ray's object store, so a cluster that is started here gets the smallest that Ray allows.
OBJECT_STORE_BYTES = 80 * 1024 * 1024
RAY_SETTINGS = {
    # Ray's default is 15, the lowest priority but four: beside anything else, a run would starve.
    "worker_niceness": 0,
    # Ray's node manager looks for its object store 0.5 ms after that has begun to start. In half of all starts it comes
    # too early, and would look again after 1 s; of 10 s in all nothing is taken.
    "raylet_client_connect_timeout_milliseconds": 20,
    "raylet_client_num_connect_attempts": 500,
}
# Ports of its own for everything: jobs may share a host.
_ANY_PORT = (
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--dashboard-agent-listen-port=0",
    "--disable-usage-stats",
    "--block",
)


def head(host: str, port: int, directory: Path, cores: int) -> list[str]:
    """The command that starts the cluster on the first host."""
    return [
        *_start(str(cores)),
        "--head",
        f"--node-ip-address={host}",
        f"--port={port}",
        f"--temp-dir={directory / RAYS_OWN}",
        "--include-dashboard=false",
        f"--system-config={json.dumps(RAY_SETTINGS)}",
        *_ANY_PORT,
    ]


def _start(given: str) -> Sequence[str]:
    cores = os.environ.get("SLURM_CPUS_ON_NODE") or given
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    return [*ray, f"--num-cpus={cores}", f"--object-store-memory={OBJECT_STORE_BYTES}"]


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def joining(address: str, cores: str) -> list[str]:
    """The command by which a further host joins the cluster."""
    return [*_start(cores), f"--address={address}", *_ANY_PORT]


def main() -> None:
    """Ray on a host that joins the cluster at ADDRESS, until the step is ended; its files in DIRECTORY go with it."""
    address, directory = sys.argv[1], Path(sys.argv[2])
    cores = sys.argv[3] if len(sys.argv) > 3 else str(len(os.sched_getaffinity(0)))
    is_told = Event()
    with same_directory(directory):
        process = subprocess.Popen(joining(address, cores))

        def end(*_: object) -> None:
            is_told.set()
            process.terminate()

        signal.signal(signal.SIGTERM, end)
        status = process.wait()
    host, _, port = address.rpartition(":")
    if "SLURM_JOB_ID" in os.environ and not listens(host, int(port)):
        slurm.queue_again_without_first_host(is_told)
    sys.exit(status)


if __name__ == "__main__":
    main()
