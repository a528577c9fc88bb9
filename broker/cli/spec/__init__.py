"""Job specifications on the command line: files, overrides, templates."""
