"""What the links carry while `network.py` or `overlap.py` runs: the share of their rate in use, from moment to moment.

Start it beside the benchmark; it ends with the network. One line for each interval: the mean over hosts of what they
send, then every host's own. A step that leaves links idle shows as lines well below the rate.

    sudo python benchmarks/link_use.py --rate 100
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

from namespaces import SWITCH

_WAIT_S = 120.0


def sent_bytes() -> dict[str, int] | None:
    """What each host has sent so far, by its port on the switch; none if there is no network."""
    done = subprocess.run(["ip", "-n", SWITCH, "-s", "-j", "link"], capture_output=True, text=True)
    if done.returncode != 0:
        return None
    links = json.loads(done.stdout)
    return {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in links if re.match(r"port\d", link["ifname"])}


def looks(interval_s: float) -> Iterator[tuple[float, dict[str, int]]]:
    """One look after another until the network is gone."""
    while (sent := sent_bytes()) is not None:
        yield time.monotonic(), sent
        time.sleep(interval_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, required=True, metavar="MBIT", help="Mbit/s of a link")
    parser.add_argument("--interval", type=float, default=0.5, metavar="SECONDS", help="between two looks")
    args = parser.parse_args()
    give_up_s = time.monotonic() + _WAIT_S
    while sent_bytes() is None:
        if time.monotonic() > give_up_s:
            sys.exit("no network benchmark is running")
        time.sleep(0.2)
    began_s = time.monotonic()
    for (before_s, before), (now_s, now) in pairwise(looks(args.interval)):
        capacity = args.rate * 1e6 / 8 * (now_s - before_s)
        shares = [(now[port] - before.get(port, 0)) / capacity for port in sorted(now)]
        if shares:
            each = " ".join(f"{share:.2f}" for share in shares)
            print(f"{now_s - began_s:7.1f} s  {sum(shares) / len(shares):.2f}  {each}", flush=True)


if __name__ == "__main__":
    main()
