"""What each virtual worker has for itself, although all share one process."""
