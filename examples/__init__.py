"""Runnable examples: the demo job, its data and its model."""
