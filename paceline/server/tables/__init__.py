"""Tables of rows that are looked up by key, of which a server holds those in its range of the hashed keys."""
