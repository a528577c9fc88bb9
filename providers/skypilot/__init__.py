"""Launcher that buys machines through a SkyPilot API server."""
