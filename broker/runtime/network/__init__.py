"""Guards of outgoing connections, shared by webhooks and by imports of data."""
