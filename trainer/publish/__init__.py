"""Publishing of results to the Hub and to buckets."""
