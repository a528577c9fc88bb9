"""Rows, leases and the ledger: PostgreSQL, its twin in memory, and the embedded server."""
