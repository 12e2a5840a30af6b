"""Admission rules: which contributions form an update, and which worker may go on.

Each rule is told what arrives, and how late it is, and answers what to do; it holds no tensor, no clock and no socket,
so that real servers and simulated ones share it.

A model is held by many shards, each with a rule of its own. Where a rule's decisions follow from which contributions
come, in whatever order (BSP), or need not agree (SSP, ASP), each shard decides for itself. With backup workers, or a
quorum, the order of arrival decides, and links differ: one shard decides, and the rules of the others are told
(`Following`).
"""

from paceline.server.admission.bulk_synchronous import BulkSynchronous
from paceline.server.admission.following import Following
from paceline.server.admission.quorum import Quorum
from paceline.server.admission.rule import AdmissionRule, Decisions, ProtocolError
from paceline.server.admission.stale_synchronous import StaleSynchronous

__all__ = ["AdmissionRule", "BulkSynchronous", "Decisions", "Following", "ProtocolError", "Quorum", "StaleSynchronous"]
