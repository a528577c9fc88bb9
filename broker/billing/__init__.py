"""Pure rules of accrual, prices, caps, time limits and invoices."""
