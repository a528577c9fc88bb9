"""Liveness, interruption notices, the spend guard and the dead-man's switch."""
