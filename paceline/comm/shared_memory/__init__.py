"""The collective among processes of one host, through memory that all of them map."""
