"""`python -m broker.cli`: the same as `gpubroker`."""

from broker.cli import main

main()
