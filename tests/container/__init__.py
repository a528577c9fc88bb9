"""The trainer's image, built and run on this machine: `python -m tests.container`."""
