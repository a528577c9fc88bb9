"""Machines that are process groups of this host."""
