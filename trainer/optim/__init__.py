"""Optimizers, learning-rate defaults and schedules."""
