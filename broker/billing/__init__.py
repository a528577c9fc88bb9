"""Accrual, prices, caps, time limits and invoices. Pure."""
