"""Pure rules of reports: digests, deliveries, progress and loss curves."""
