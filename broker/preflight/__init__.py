"""Free checks before a purchase: the data set, its columns, and the model's config and licence."""
