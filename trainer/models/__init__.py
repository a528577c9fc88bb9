"""Loads models, adapters and tokenizers."""
