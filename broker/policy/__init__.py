"""Budgets, windows and dry runs of policies. Pure."""
