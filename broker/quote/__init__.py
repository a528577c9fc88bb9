"""Pure rules of quotes: costs on every offer, placement and forecasts."""
