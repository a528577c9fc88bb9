"""Facts about live attempts: heartbeats, machine listings, proofs of absence."""
