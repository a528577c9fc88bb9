"""Clocks, circuit breaker, rate limits, secrets and the control loop."""
