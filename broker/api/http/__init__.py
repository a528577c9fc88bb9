"""The HTTP server: OpenAPI layer, connections, server-sent events, terminals."""
