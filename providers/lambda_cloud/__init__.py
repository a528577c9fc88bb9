"""Lambda Cloud: offers and machines."""
