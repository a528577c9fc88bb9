"""Provider whose machines are process groups of this host."""
