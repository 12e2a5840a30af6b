"""Studies: one script under several strategies and numbers of workers, measured, compared and explained."""
