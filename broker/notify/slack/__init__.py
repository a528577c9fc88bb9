"""Slack: notifier, buttons and Socket Mode."""
