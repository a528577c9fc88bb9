"""Offer history and price wishes on PostgreSQL."""
