"""Lambda."""
