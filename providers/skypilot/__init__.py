"""Launches machines through a SkyPilot API server."""
