"""Methods of the client, one module per resource."""
