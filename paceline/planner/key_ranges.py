"""How long one worker's key ranges take to servers and back where it trains alone, and what of them leaves its host."""

import numpy as np

from paceline.planner.fabric import Floats
from paceline.planner.setting import Setting


def range_s(setting: Setting, near: Floats, far: Floats, range_bytes: float) -> Floats:
    """How long one worker's key ranges take through its own card (`near`) and the servers' cards (`far`)."""
    workers, servers = np.array(setting.places.workers), np.array(setting.places.servers)
    here = np.bincount(servers, minlength=setting.fabric.num_hosts)[workers]
    card_s = remote_bytes(setting, range_bytes) / near[workers]
    server_s = np.where(here < len(servers), range_bytes / far[servers].min(), 0.0)
    memory_s = here * range_bytes / setting.fabric.rates.memory[workers]
    alone_s: Floats = np.maximum(np.maximum(card_s, server_s), memory_s)
    return alone_s


def remote_bytes(setting: Setting, range_bytes: float) -> Floats:
    """What each worker sends to servers on other hosts."""
    servers = np.array(setting.places.servers)
    here = np.bincount(servers, minlength=setting.fabric.num_hosts)[np.array(setting.places.workers)]
    remote: Floats = (len(servers) - here) * range_bytes
    return remote
