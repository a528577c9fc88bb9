"""The gRPC API: messages to models and back (`codec`), what every call passes (`doorkeeper`), one file a concern."""
