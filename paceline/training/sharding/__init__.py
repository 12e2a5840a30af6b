"""A script's data divided among ranks: every sample once, and as many batches for every rank."""

from paceline.training.sharding.division import RankBatch, share_out
from paceline.training.sharding.loader import ShardedLoader
from paceline.training.sharding.part import DIFFERS, Part, Place
from paceline.training.sharding.rounds import RoundBatches
from paceline.training.sharding.stand_in import StandIn
from paceline.training.sharding.unprepared import UnpreparedLoaders

__all__ = [
    "DIFFERS",
    "Part",
    "Place",
    "RankBatch",
    "RoundBatches",
    "ShardedLoader",
    "StandIn",
    "UnpreparedLoaders",
    "share_out",
]
