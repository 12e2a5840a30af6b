"""A federated run whose clients are processes of their own, anywhere: the server's script, and a client's."""
