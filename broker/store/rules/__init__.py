"""Rules of the store that both implementations share."""
