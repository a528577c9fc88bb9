"""The clouds, one module each, behind the `Provider` port of the broker."""
