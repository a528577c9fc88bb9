"""Facts about published models: a bundled catalogue of their configs, and the parameter count of a config."""
