"""Vast.ai: offers and instances."""
