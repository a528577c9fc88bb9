"""The gpubroker daemon: decides, buys, watches and settles; talks to clouds only through its ports.

For programs: `broker.Client`, `broker.AsyncClient` and `broker.fit`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.client.blocking import Client
    from broker.client.client import AsyncClient
    from broker.client.fit import afit, fit

__all__ = ["AsyncClient", "Client", "afit", "fit"]
_HOMES = {"AsyncClient": "client", "Client": "blocking", "afit": "fit", "fit": "fit"}


def __getattr__(name: str) -> Any:
    """Imported when asked for: the daemon and the trainer's contract do without."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"broker.client.{_HOMES[name]}"), name)
