"""Simulates the allocations of one training step. Pure."""
