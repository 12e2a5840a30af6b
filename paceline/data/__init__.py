"""Data sets of the field's papers, held as uint8 and normalised a batch at a time."""

from paceline.data.augment import augment_cifar10
from paceline.data.catalogue import NAMES, load
from paceline.data.dataset import Dataset, DatasetError, Split, collate

__all__ = ["NAMES", "Dataset", "DatasetError", "Split", "augment_cifar10", "collate", "load"]
