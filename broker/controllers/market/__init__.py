"""Offers of all providers: polled, checked, the latest kept."""
