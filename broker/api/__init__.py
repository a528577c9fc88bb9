"""HTTP and gRPC APIs of the daemon.

| package | holds |
|---|---|
| `schemas` | requests and answers; the client uses them too |
| `service` | use cases, shared by HTTP and gRPC |
| `core` | authentication, errors, limits, readiness and metrics, shared by HTTP and gRPC |
| `http`, `handlers` | OpenAPI layer and connections; one handler module per resource |
| `grpc`, `proto` | servicers and codec; the protocol and its generated stubs |
"""
