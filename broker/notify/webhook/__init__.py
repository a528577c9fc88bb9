"""Signed webhooks to public addresses."""
