"""The trainer: runs alone in the container; never imports the broker."""
