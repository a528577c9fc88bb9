"""Readers of training data that the broker shares."""
