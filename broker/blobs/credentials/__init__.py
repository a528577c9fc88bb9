"""Credentials that a machine gets, limited to its job's part of the blob store."""
