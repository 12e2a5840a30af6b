"""A script's data divided among ranks: every sample once, and as many batches for every rank."""

from paceline.training.sharding.division import RankBatch, share_out
from paceline.training.sharding.loader import ShardedLoader
from paceline.training.sharding.part import Part, Place

__all__ = ["Part", "Place", "RankBatch", "ShardedLoader", "share_out"]
