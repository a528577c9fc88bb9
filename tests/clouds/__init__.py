"""Emulated clouds: Lambda, RunPod and Vast by HTTP on loopback, AWS by moto, and real machines behind them."""
