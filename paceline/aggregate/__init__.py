"""How the contributions to one update are joined: coordinate by coordinate, or by how they lie to each other."""

from paceline.aggregate.base import (
    Aggregator,
    ByGram,
    Contribution,
    ContributionKind,
    can_join,
    counted,
    gram_of,
    join,
    require_joined,
)
from paceline.aggregate.coordinates import MEAN, AroundMedian, MajorityVote, Median, TrimmedMean, WeightedMean
from paceline.aggregate.distances import Bulyan, CenteredClipping, GeometricMedian, Krum, MultiKrum
from paceline.aggregate.mixing import NearestNeighbours, NormClipping
from paceline.aggregate.rejecting import Validation
from paceline.aggregate.trusting import FLTrust, FoolsGold

__all__ = [
    "MEAN",
    "Aggregator",
    "AroundMedian",
    "Bulyan",
    "ByGram",
    "CenteredClipping",
    "Contribution",
    "ContributionKind",
    "FLTrust",
    "FoolsGold",
    "GeometricMedian",
    "Krum",
    "MajorityVote",
    "Median",
    "MultiKrum",
    "NearestNeighbours",
    "NormClipping",
    "TrimmedMean",
    "Validation",
    "WeightedMean",
    "can_join",
    "counted",
    "gram_of",
    "join",
    "require_joined",
]
