"""The Ray engine: workers and servers as real processes, on one machine or a cluster."""
