"""Builds and runs the daemon: configuration, home directory, listeners."""
