"""Container tasks as Gymnasium envs with full checkpoints and recovery that keeps the model's context true."""
