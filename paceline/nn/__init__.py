"""Layers whose parameters are not the model's: tables of rows that servers hold, and how these are updated."""

from paceline.nn.sharded_embedding import ShardedEmbedding, read_ahead, read_together
from paceline.server.tables.row_optimizers import FTRL, SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "RowOptimizer",
    "RowWiseAdagrad",
    "ShardedEmbedding",
    "read_ahead",
    "read_together",
]
