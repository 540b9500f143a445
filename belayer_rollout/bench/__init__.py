"""What `belayer bench failover` measures."""
