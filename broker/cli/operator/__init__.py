"""Commands for the operator of an installation."""
