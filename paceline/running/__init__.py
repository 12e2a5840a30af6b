"""A run as a whole: started, watched, and read from its directory."""
