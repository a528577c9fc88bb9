"""Amazon EC2: offers, machines and checks."""
