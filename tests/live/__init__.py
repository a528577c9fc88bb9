"""The real clouds, for whoever has keys: see docs/clouds.md."""
