"""State machine, liveness, recovery and retention of attempts. Pure."""
