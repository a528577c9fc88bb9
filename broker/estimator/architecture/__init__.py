"""Model families, LoRA targets and model states. Pure."""
