"""The web interface: pages rendered on the server over the same use cases as the HTTP API, never HTTP to itself.

The daemon mounts it with `broker.web.app.mount`. docs/guide/web.md describes the pages.
"""
