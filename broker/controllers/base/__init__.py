"""Context, row leases, batches and events shared by all controllers."""
