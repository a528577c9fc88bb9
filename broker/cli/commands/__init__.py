"""Commands of a team: policies, channels, tokens, spending, catalogs."""
