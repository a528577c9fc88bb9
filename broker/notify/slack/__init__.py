"""The Slack notifier, its buttons and its socket."""
