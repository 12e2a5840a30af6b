"""What one worker does in a run: the session that joins a script to a strategy, and what it is made of."""
