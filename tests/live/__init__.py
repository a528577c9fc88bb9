"""Tests on the real clouds; they need keys: see docs/guide/clouds.md."""
