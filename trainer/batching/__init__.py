"""Examples, samplers and memory-mapped datasets."""
