"""A Ray with a dashboard, which takes jobs, as KubeRay starts one: a head without cores, and a host with two. It says
so once it is there, and ends with its standard input.

    python takes_jobs.py PORT DIRECTORY
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # 30 are too few beside other tests

from ray._private.utils import write_ray_address
from ray.cluster_utils import Cluster

node = {"object_store_memory": 80_000_000}
head = {**node, "num_cpus": 0, "include_dashboard": True, "dashboard_port": int(sys.argv[1]), "temp_dir": sys.argv[2]}
cluster = Cluster(initialize_head=True, head_node_args=head)
try:
    cluster.add_node(num_cpus=2, **node)
    cluster.wait_for_nodes()
    # The dashboard tells jobs this address. Without it, it looks for any Ray of the machine, such as another test's.
    write_ray_address(cluster.address, sys.argv[2])
    print("takes jobs", flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
