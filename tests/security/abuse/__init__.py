"""Attacks on a real daemon with bounded memory, while a second team's calls are timed.

    .venv/bin/python -m tests.security.abuse [--only NAME ...] [--seconds 10]

The last line is one JSON object: attacks, survived, other_team_p99_ms, peak_mb, loop_stall_max_ms. The exit status is 1
if an attack exceeded a limit of `measure`.

To add attacks, write a module with functions decorated by `registry.attack`, and name the module in `registry.MODULES`.
"""
