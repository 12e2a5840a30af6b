"""A worker's clock, and who may look at the model that its time goes into."""

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from paceline.strategies.replica import Replica


class Pacing(ABC):
    """What engines that simulate time, and probes that measure steps, replace."""

    is_simulated = False
    """Time is simulated, and many workers share a process."""
    operation_s = 0.0
    """What each operation of coding takes a simulated host of speed 1, besides its bytes."""

    @abstractmethod
    def now_s(self) -> float:
        """The time on the clock that this worker's run is timed with."""

    def spend(self, seconds: float) -> None:
        """Something besides the model took a core so long; real time has passed by itself."""

    def rest(self, seconds: float) -> None:
        """Do nothing for so long."""
        time.sleep(seconds)

    def carry(self, num_bytes: float) -> float:
        """A client that this worker plays has sent so much to the server, which the first worker plays, and it has
        come. Returns how long that took, in seconds."""
        return 0.0

    @abstractmethod
    def watch(self, replica: "Replica") -> None:
        """The script has prepared this model. Called before the strategy is bound to it."""


@final
class RealTime(Pacing):
    """Time passes by itself, whatever the model does."""

    now_s = staticmethod(time.perf_counter)

    def watch(self, replica: "Replica") -> None:
        pass
