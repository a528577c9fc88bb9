"""Publishes results to the Hub and to buckets."""
