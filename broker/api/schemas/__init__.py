"""Documents of the HTTP and gRPC APIs."""
