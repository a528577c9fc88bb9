"""What the cloud providers share."""
