"""Frozen domain types without input or output."""
