"""What can be known for nothing: the data set, its columns, the model's config and licence, before money is spent."""
