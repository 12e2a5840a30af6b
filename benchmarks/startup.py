"""How long a run takes from the command to its first step, beside what Ray and torch take by themselves.

Every contender is a fresh Python process on this machine, timed from its start: Ray alone until `ray.init` returns;
the same, and two actors that have imported torch and made an optimizer, with which torch loads its compiler; and
`paceline run` with two workers until worker 0 has made a step.

    python benchmarks/startup.py --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import tell
from rich.table import Table
from rounds import compile_paceline, ratio_of

_RAY = """
import sys, time
import ray
ray.init(address="local", include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False,
         logging_level="ERROR")
"""
_ACTORS = """
@ray.remote(num_cpus=0.5)
class Actor:
    def __init__(self):
        import torch
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    def ready(self):
        return True
ray.get([actor.ready.remote() for actor in [Actor.remote(), Actor.remote()]])
"""
_DONE = """
open(sys.argv[1], "w").write(str(time.monotonic()))
"""
_TRAINING = """
import sys, time
import torch
import paceline
worker = paceline.init()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=8)
model, optimizer, loader = worker.prepare(model, optimizer, loader)
for (x,) in loader:
    model(x).mean().backward()
    optimizer.step()
    break
if worker.rank == 0:
""" + _DONE.replace("\nopen", "\n    open")
_LAUNCHER = "from paceline.cli import main; main()"
_LIMIT_S = 120.0


def python(code: str) -> list[str]:
    return ["-c", code]


def paceline_run(strategy: str) -> list[str]:
    return [*python(_LAUNCHER), "run", "train.py", "--strategy", strategy, "--workers", "2", "--out", "run", "--"]


CONTENDERS = {
    "ray.init": python(_RAY + _DONE),
    "ray.init and 2 actors with torch": python(_RAY + _ACTORS + _DONE),
    "paceline run, all-reduce": paceline_run("all-reduce"),
    "paceline run, ps-bsp": paceline_run("ps-bsp"),
}


def seconds_to_done(arguments: list[str]) -> float:
    """From the start of the process until it, or its worker 0, has written down that it is done."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "train.py").write_text(_TRAINING)
        done = Path(directory) / "done"
        began_s = time.monotonic()
        command = [sys.executable, *arguments, str(done)]
        subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=_LIMIT_S)
        return float(done.read_text()) - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    args = parser.parse_args()
    compile_paceline()
    times_s: dict[str, list[float]] = {name: [] for name in args.only}
    for number in range(args.rounds):
        for name in args.only:
            times_s[name].append(seconds_to_done(CONTENDERS[name]))
            print(f"round {number + 1}/{args.rounds}  {name}: {times_s[name][-1]:.2f} s", file=sys.stderr)
    table = Table("contender", "seconds", "lowest to highest", f"times {args.only[0]}")
    for name, values in times_s.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        table.add_row(name, f"{statistics.median(values):.2f}", spread, ratio_of(values, times_s[args.only[0]]))
    tell([table], {"seconds": times_s})


if __name__ == "__main__":
    main()
