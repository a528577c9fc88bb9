"""Use cases of the API, shared by HTTP and gRPC."""
