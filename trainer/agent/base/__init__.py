"""State and environment of the agent."""
