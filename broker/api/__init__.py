"""The HTTP API: the use cases once (`service`), and the door to them.

| module | holds |
|---|---|
| `models` | what goes over the wire, in and out; the client builds on it too |
| `service` | quote, submit, list, cancel, retry, cap, files, secrets, tokens: by owner |
| `openapi` | operations declared once: routing, validation and the OpenAPI 3.1 document |
| `http`, `jobs`, `feeds`, `files`, `admin` | the application and its handlers, by concern |
| `auth`, `problems`, `sse`, `metrics` | bearer tokens, RFC 9457 errors, event streams, Prometheus |
"""
