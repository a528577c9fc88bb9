"""Pure rules of policies: budgets, windows and dry runs."""
