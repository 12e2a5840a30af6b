"""Each worker's computing times: those that the virtual engine would draw."""

from typing import final

import numpy as np

from paceline.engines.virtual.computing.durations import ComputeTimes
from paceline.planner.fabric import Floats
from paceline.planner.setting import Setting


@final
class Draws:
    def __init__(self, setting: Setting, *, seed: int) -> None:
        compute = setting.cluster.compute
        self._means_s = [setting.groups[number].times.mean_s for number in setting.group_of]
        self._times = [ComputeTimes(compute, seed=seed, rank=rank) for rank in range(setting.num_workers)]

    def next_s(self, rank: int, *, num_steps: int = 1) -> float:
        return sum(self._times[rank].draw(self._means_s[rank]) for _ in range(num_steps))

    def all_s(self) -> Floats:
        return np.array([self.next_s(rank) for rank in range(len(self._times))])
