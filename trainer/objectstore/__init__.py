"""Object store of a run, and multipart uploads."""
