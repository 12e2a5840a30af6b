"""Who takes part while workers come and die: the protocol and the data's cursor, as values without socket, clock or
thread."""

from paceline.elastic.coordinator import Coordinator
from paceline.elastic.cursor import Cursor, Deal, resized
from paceline.elastic.lane_book import LaneBook
from paceline.elastic.lanes import Done, Lane, LaneBatch, Lanes, further
from paceline.elastic.lease import Lease
from paceline.elastic.member import Member
from paceline.elastic.messages import Form, Report, StaleEpoch
from paceline.elastic.spec import Elastic, GlobalBatch

__all__ = [
    "Coordinator",
    "Cursor",
    "Deal",
    "Done",
    "Elastic",
    "Form",
    "GlobalBatch",
    "Lane",
    "LaneBatch",
    "LaneBook",
    "Lanes",
    "Lease",
    "Member",
    "Report",
    "StaleEpoch",
    "further",
    "resized",
]
