"""Decisions about spot machines of jobs with a deadline: reviews of running attempts."""
