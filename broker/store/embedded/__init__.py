"""The daemon's own PostgreSQL server."""
