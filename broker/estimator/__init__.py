"""What to do: pure functions. No await, clock, randomness or I/O in this room."""
