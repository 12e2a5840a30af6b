"""The same training loop under other systems, to measure Paceline against; one file a system."""
