"""Sign-in by an OpenID Connect provider: authorization code flow with PKCE. docs/guide/teams.md describes its use."""
