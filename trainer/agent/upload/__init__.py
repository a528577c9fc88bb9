"""What the agent uploads: heartbeats, logs, checkpoints."""
