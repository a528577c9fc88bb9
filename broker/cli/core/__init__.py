"""Output, exit codes and the error handling of all commands."""
