"""Ways to tell people."""
