"""Rules on terminating attempts, and on orphans that are destroyed."""
