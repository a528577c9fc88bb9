"""The real clouds, for whoever has keys: see docs/guide/clouds.md."""
