"""Code that the cloud providers share."""
