"""Pure rules of the life of jobs, attempts, machines and stored data."""
