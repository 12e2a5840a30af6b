"""Workers of a simulated run that die, leave and come: when, and what the others do then."""
