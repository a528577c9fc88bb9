"""Signed webhooks, and the guard of their addresses."""
