"""How far models reach: the check before the purchase reads the same of a config as the trainer's own."""

STRETCHED = ("linear", "dynamic", "yarn")
"""Kinds of rotary positions that multiply how far a model reaches; `llama3` and `longrope` have counted it already."""
