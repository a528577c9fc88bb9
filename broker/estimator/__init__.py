"""Pure functions that estimate memory, speed and cost of a job. They use no await, clock, randomness or I/O."""
