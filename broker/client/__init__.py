"""Python client of the HTTP API: `broker.Client`, `broker.AsyncClient`, `broker.fit`.

| module | holds |
|---|---|
| `async_client`, `sync_client` | typed calls; feeds that resume after a broken connection |
| `fit`, `files` | a fine-tune in one call; results saved into a folder |
| `notebook` | live progress in a notebook |
| `resources` | calls of one resource each |
| `transport` | requests and retries, server-sent events, the daemon's address, errors |
"""
