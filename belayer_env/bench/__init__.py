"""What Belayer costs, measured against what people use today, on this machine and in one run."""
