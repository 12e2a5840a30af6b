"""Measuring a real cluster, so that a virtual one can be made of it."""
