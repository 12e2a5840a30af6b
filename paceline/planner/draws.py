"""Each worker's computing times: those that the virtual engine would draw."""

from typing import final

import numpy as np

from paceline.engines.virtual.computing.durations import ComputeTimes
from paceline.planner.core_turns import Cores
from paceline.planner.fabric import Floats
from paceline.planner.setting import Setting


@final
class Draws:
    def __init__(self, setting: Setting, *, seed: int) -> None:
        compute = setting.cluster.compute
        self._means_s = [setting.groups[number].times.mean_s for number in setting.group_of]
        self._times = [ComputeTimes(compute, seed=seed, rank=rank) for rank in range(setting.num_workers)]
        self._sharing = np.array([setting.groups[number].num_sharing for number in setting.group_of])
        self._cores = Cores(setting.cores) if setting.takes_turns else None

    def next_s(self, rank: int, *, num_steps: int = 1) -> float:
        return sum(self._times[rank].draw(self._means_s[rank]) for _ in range(num_steps))

    def needed_s(self, rank: int) -> float:
        """Seconds of a core that a worker's next step needs; others may share the core."""
        return self.next_s(rank) / float(self._sharing[rank])

    def all_s(self, now_s: Floats, *, besides_s: Floats | float = 0.0) -> Floats:
        """How long all workers compute a step from these times on, and do what needs a core for so long besides, turns
        at cores included."""
        needed_s = np.array([self.next_s(rank) for rank in range(len(self._times))])
        if self._cores is None:
            return needed_s + besides_s
        return self._cores.serve(now_s, needed_s / self._sharing + besides_s) - now_s
