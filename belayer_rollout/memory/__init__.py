"""Memory that outlives a worker: weights and the KV arena, held by an owner process."""
