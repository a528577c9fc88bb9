"""Simulation of a job over traces of spot prices and availability, by the decision code of placement and review."""
