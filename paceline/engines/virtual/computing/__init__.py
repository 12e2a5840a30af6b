"""How long virtual workers compute, and how their clocks move on meanwhile."""
