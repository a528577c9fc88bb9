"""Wires the daemon: configuration, home directory, listeners."""
