"""Delivers the outbox and posts digests."""
