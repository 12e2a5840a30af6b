"""What is said where far more workers are asked for than this machine has cores."""

import os

from rich.console import Console

from paceline.engines.ray.nodes import chosen_address

# A few workers a core is how one tries a script on a laptop, and nobody takes that for a cluster. With more than four,
# each waits for its turn for over three quarters of the time, and its times are mostly those of waiting.
_MOST_PER_CORE = 4


def warn(console: Console, workers: int, *, engine: str, address: str | None) -> None:
    """Say so once, where workers are processes of this machine alone."""
    num_cores = len(os.sched_getaffinity(0))
    if engine != "ray" or chosen_address(address) is not None or workers <= _MOST_PER_CORE * num_cores:
        return
    cores = f"{num_cores} core{'' if num_cores == 1 else 's'}"
    console.print(
        f"{workers} workers on {cores} take turns: this shows whether they train, but their times say nothing about a "
        "cluster. --engine virtual --cluster FILE|NAME simulates one.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
