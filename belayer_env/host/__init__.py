"""Facts about the host, and what `belayer setup` makes on it."""
