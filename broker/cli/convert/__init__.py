"""Task files of other tools as specs: SkyPilot's task YAML and dstack's `.dstack.yml`."""
