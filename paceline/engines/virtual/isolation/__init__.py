"""What each virtual worker has for itself, though all share one process."""
