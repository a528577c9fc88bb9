"""The gpubroker daemon: plans, buys, monitors and bills. It talks to clouds only through its ports.

For programs: `broker.Client`, `broker.AsyncClient`, `broker.fit` and `broker.estimate`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.client.async_client import AsyncClient
    from broker.client.fit import afit, fit
    from broker.client.sync_client import Client
    from broker.sizing.estimate import estimate

__all__ = ["AsyncClient", "Client", "afit", "estimate", "fit"]
_MODULES = {
    "AsyncClient": "broker.client.async_client",
    "Client": "broker.client.sync_client",
    "afit": "broker.client.fit",
    "estimate": "broker.sizing.estimate",
    "fit": "broker.client.fit",
}


def __getattr__(name: str) -> Any:
    """Import on first use, because the daemon and the trainer's contract do not need the client."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
