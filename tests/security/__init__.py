"""Tests that teams are isolated by the database and by every call."""
