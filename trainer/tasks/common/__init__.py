"""Modules that several tasks use."""
