"""Readers of training data, shared with the broker."""
