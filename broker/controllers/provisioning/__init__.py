"""Places jobs on offers, and creates and boots their machines."""
