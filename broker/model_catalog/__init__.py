"""What published models are: a bundled catalogue of their configs, and how many parameters a config describes."""
