"""A Ray with a dashboard, which takes jobs, as KubeRay starts one: a head without cores, and a host with two. It says
so once it is there, and ends with its standard input.

    python takes_jobs.py PORT
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

node = {"object_store_memory": 80_000_000}
head = {**node, "num_cpus": 0, "include_dashboard": True, "dashboard_port": int(sys.argv[1])}
cluster = Cluster(initialize_head=True, head_node_args=head)
try:
    cluster.add_node(num_cpus=2, **node)
    cluster.wait_for_nodes()
    print("takes jobs", flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
