"""Destroys machines, proves their absence, and sweeps orphans."""
