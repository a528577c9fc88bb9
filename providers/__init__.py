"""Providers of machines, one package each, behind the broker's `Provider` port."""
