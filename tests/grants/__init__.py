"""Credentials of one attempt, held to what their policy says by a gate in front of moto."""
