"""Parameter servers as processes: what workers and servers say to each other, and over what."""
