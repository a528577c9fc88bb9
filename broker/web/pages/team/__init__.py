"""Pages of a team: tokens, secrets, channels, policies, approvals and the audit."""
