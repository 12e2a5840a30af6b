"""The virtual engine: the same scripts and strategies on a simulated cluster, with real gradients."""
