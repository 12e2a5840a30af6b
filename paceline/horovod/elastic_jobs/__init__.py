"""The launcher's half of elastic jobs: which hosts there are, who takes part, and the processes."""
