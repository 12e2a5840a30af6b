"""What a cluster is: its description, its TOML file, and who is placed where."""
