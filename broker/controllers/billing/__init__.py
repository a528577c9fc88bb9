"""Charges attempts, holds caps and budgets, charges and deletes stored data."""
