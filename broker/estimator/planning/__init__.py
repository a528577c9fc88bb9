"""Searches the plan of a job, and corrects estimates by own runs. Pure."""
