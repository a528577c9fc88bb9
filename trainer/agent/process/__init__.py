"""Processes that the agent starts."""
