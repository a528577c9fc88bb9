"""The store in memory, for simulation and tests."""
