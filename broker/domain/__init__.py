"""What things are: frozen data without behaviour towards the outside."""
