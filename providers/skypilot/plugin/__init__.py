"""Plugin that runs inside the SkyPilot API server."""
