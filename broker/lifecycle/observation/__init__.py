"""Facts about live attempts as values: listings, the absence they prove, and one observation of an attempt."""
