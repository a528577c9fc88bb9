"""The object store of a run, and multipart uploads."""
