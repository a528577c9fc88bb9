"""Types of the market over time: recorded prices and availability, and wishes for a price."""
