"""Vast."""
