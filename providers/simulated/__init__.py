"""A simulated market whose machines are host processes, or exist in memory only."""
