"""`broker.estimate()` and the scaling tables."""
