"""The collective among several hosts with several ranks each."""
