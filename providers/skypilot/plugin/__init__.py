"""Runs inside the SkyPilot API server."""
