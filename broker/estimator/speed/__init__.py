"""Seconds of a training step on a GPU. Pure."""
