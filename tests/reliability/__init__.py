"""Faults of the daemon's host, one after the other, each against a real daemon with a running job.

    .venv/bin/python -m tests.reliability [--only NAME ...] [--sample N]

The last line is one JSON object: scenarios, passed, failed. docs/design/reliability.md lists the expected outcomes. To
add a scenario, write a function with the decorator `registry.scenario`, and name its module in `registry.MODULES`.
"""
