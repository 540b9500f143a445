"""What every bench of Belayer says the same way, of both packages: the machine, the report, the tables."""
