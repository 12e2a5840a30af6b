"""Paceline: one PyTorch script, any data-parallel architecture, and the clock that tells which gets there first."""
