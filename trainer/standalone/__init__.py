"""Training on this machine without a broker."""
