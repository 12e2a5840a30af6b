"""The simulated network, and the collective operations over it."""
