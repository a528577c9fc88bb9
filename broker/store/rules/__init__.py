"""Rules that every implementation of the store shares: PostgreSQL, and the in-memory store of the tests."""
