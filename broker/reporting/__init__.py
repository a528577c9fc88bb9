"""What a job reports to its team: digests, delivery rules, progress and loss curves. Pure."""
