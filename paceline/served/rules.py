"""What a served run's rounds go by."""

from dataclasses import dataclass
from itertools import count

from paceline.roster import Sampler, num_drawn


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What decides who takes part in a round, and until when."""

    sampler: Sampler
    fraction: float
    seed: int
    min_clients: int = 1
    """How many clients have to be there before a round begins."""
    deadline_s: float = 600.0
    """A round lasts so long at most."""
    outweigh: float = 10.0
    """A client counts at most so many times as much as the median one of its round."""
    over: float = 1.0
    """How many times as many clients are drawn as are needed; a round ends with as many as are needed."""
    weighs: bool = True
    """Clients count by their samples."""
    least: int = 1
    """Fewer clients make no round."""

    @property
    def fewest(self) -> int:
        """How many have to be there for a round to begin."""
        enough = next(present for present in count(1) if num_drawn(self.fraction, present) >= self.least)
        return max(self.min_clients, enough)
