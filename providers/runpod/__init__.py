"""RunPod: offers and pods."""
