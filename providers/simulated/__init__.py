"""A simulated market, on real processes or in memory."""
