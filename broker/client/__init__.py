"""The HTTP API from Python: `from broker.client.async_client import AsyncClient`.

| module | holds |
|---|---|
| `client` | `AsyncClient`: typed calls, feeds that resume by themselves |
| `transport`, `sse` | one request and its retries; server-sent events |
| `connection` | which daemon: environment, `client.json`, the stored login |
| `errors` | `Unreachable`, `ApiError`, `Damaged` |
"""
