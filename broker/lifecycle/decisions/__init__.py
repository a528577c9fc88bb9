"""Pure decisions about one attempt: each takes the facts that a controller gathered and returns a value to write."""
