"""Offers of all providers, and corrections from observed runs."""
