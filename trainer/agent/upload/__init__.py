"""Uploads of the agent: heartbeats, logs, checkpoints."""
