"""Ranks offers by expected dollars to finish, and explains each that is dropped. Pure."""
