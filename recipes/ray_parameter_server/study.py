"""Reproduces the published study of parameter servers on Ray, one part at a time.

    python recipes/ray_parameter_server/study.py convnet --engine virtual
    python recipes/ray_parameter_server/study.py resnet18 --scale small --engine virtual
    python recipes/ray_parameter_server/study.py resnet18 --engine virtual --device cuda
    python recipes/ray_parameter_server/study.py vgg16 --address HEAD:6379

Each is one `paceline compare`, which is printed, and goes on where it was if it is interrupted. What came out, beside
what was published, is in docs/experiment.md.
"""

import argparse
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

PARTS_HELP = "which experiment; -async: without waiting; -both: both side by side"
SCRIPT = Path(__file__).with_name("train.py")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One experiment of the study. The defaults are what its parts have in common."""

    model: str
    strategies: str = "ps-bsp"
    workers: tuple[int, ...] = (1, 2, 3, 4, 5, 10, 15, 20)
    """The study's, and 2 to 4, which its author names as missing."""
    accuracy: float
    max_steps: int = 10_000
    eval_every: int = 10
    batch_size: int = 100
    width: int = 64
    eval_samples: int = 2000

    def command(self, *, seeds: str, out: Path, options: list[str], script_options: list[str]) -> list[str]:
        """What a user would type; `options` are further ones of `paceline compare`."""
        paceline = str(Path(sys.executable).with_name("paceline"))
        study = ["--strategies", self.strategies, "--workers", ",".join(map(str, self.workers)), "--seeds", seeds]
        ends = ["--target", f"accuracy={self.accuracy}", "--max-steps", str(self.max_steps)]
        ends += ["--eval-every", f"{self.eval_every}iterations"]
        script = ["--model", self.model, "--batch-size", str(self.batch_size), "--eval-samples", str(self.eval_samples)]
        if self.model != "convnet":
            script += ["--width", str(self.width)]
        command = [paceline, "compare", str(SCRIPT), *study, *ends, "--out", str(out), *options]
        return [*command, "--", *script, *script_options]


PARTS = {
    "convnet": Part(model="convnet", accuracy=0.40),
    # The study's own asynchronous runs are of ResNet-18 alone.
    "convnet-async": Part(model="convnet", strategies="ps-asp", accuracy=0.40, max_steps=20_000),
    "convnet-both": Part(model="convnet", strategies="ps-bsp,ps-asp", workers=(10,), accuracy=0.40, max_steps=20_000),
    "resnet18": Part(model="resnet18", accuracy=0.60),
    "resnet18-async": Part(model="resnet18", strategies="ps-asp", accuracy=0.55, max_steps=20_000),
    "resnet18-both": Part(model="resnet18", strategies="ps-bsp,ps-asp", workers=(10,), accuracy=0.60, max_steps=20_000),
    # Named by the study as what comes next.
    "vgg16": Part(model="vgg16", strategies="ps-bsp,ps-asp", accuracy=0.60, max_steps=20_000),
}


def small(part: Part) -> Part:
    """For two cores and the virtual engine: the conv net as it is; of the others a 64th, and targets within reach."""
    if part.model == "convnet":
        return part
    accuracy = 0.25 if part.strategies == "ps-asp" else 0.30
    steps = part.max_steps // 5
    if part.model == "vgg16":  # enough to see that it learns
        part, accuracy, steps = replace(part, workers=(1, 5)), 0.20, 500
    return replace(part, accuracy=accuracy, max_steps=steps, batch_size=20, width=8, eval_samples=500)


def tiny(part: Part) -> Part:
    """Seconds, to see that the command works."""
    return replace(
        small(part), workers=part.workers[:2], max_steps=4, eval_every=2, batch_size=4, width=2, eval_samples=50
    )


SCALES = {"published": lambda part: part, "small": small, "tiny": tiny}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS, help=PARTS_HELP)
    parser.add_argument("--scale", choices=SCALES, default="published", help="how much of it; the report says so, too")
    parser.add_argument("--workers", help="other numbers of workers, as 1,2")
    parser.add_argument("--seeds", default="3", help="how many, as 3, or which, as 0,1,2")
    parser.add_argument("--max-steps", type=int, help="iterations after which a run ends, instead of the part's")
    parser.add_argument("--max-time", help="seconds after which it ends, besides")
    parser.add_argument("--after-target", choices=("stop", "continue"), default="stop", help="continue: whole curves")
    parser.add_argument("--engine", choices=("ray", "virtual"), default="ray", help="real processes, or simulated ones")
    parser.add_argument("--cluster", default="published", help="what --engine virtual simulates")
    parser.add_argument("--address", help="of a Ray cluster")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what workers compute with")
    parser.add_argument("--out", type=Path, help="by default studies/PART-SCALE-ENGINE")
    parser.add_argument("script_options", nargs="*", help="for train.py, after --, as --momentum 0.9 --reduction mean")
    return parser.parse_intermixed_args()  # the script's options stand after those of this command


def main() -> None:
    args = parse_arguments()
    part = SCALES[args.scale](PARTS[args.part])
    if args.workers:
        part = replace(part, workers=tuple(map(int, args.workers.split(","))))
    if args.max_steps:
        part = replace(part, max_steps=args.max_steps)
    options = ["--engine", "virtual", "--cluster", args.cluster] if args.engine == "virtual" else []
    options += ["--after-target", args.after_target] * (args.after_target != "stop")
    if args.max_time:
        options += ["--max-time", args.max_time]
    if args.device != "auto":
        options += ["--device", args.device]
    if args.address:
        options += ["--address", args.address]
    out = args.out or Path("studies") / f"{args.part}-{args.scale}-{args.engine}"
    command = part.command(seeds=args.seeds, out=out, options=options, script_options=args.script_options)
    print(shlex.join(command), flush=True)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
