"""The parameter server without its sockets: key ranges, admission rules and the shard that owns a range."""
