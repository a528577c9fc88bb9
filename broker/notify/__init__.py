"""Notification channels: log, Slack and webhooks."""
