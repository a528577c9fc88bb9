"""Tables and summaries that the command line prints."""
