"""Errors, process exit, configuration files and disk space."""
