"""vLLM in this process, as a worker."""
