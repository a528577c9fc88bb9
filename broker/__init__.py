"""The gpubroker daemon: decides, buys, watches and settles; talks to clouds only through its ports.

For programs: `broker.Client`, `broker.AsyncClient`, `broker.fit` and `broker.estimate`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.client.blocking import Client
    from broker.client.client import AsyncClient
    from broker.client.fit import afit, fit
    from broker.sizing import estimate

__all__ = ["AsyncClient", "Client", "afit", "estimate", "fit"]
_HOMES = {"AsyncClient": "client", "Client": "blocking", "afit": "fit", "fit": "fit"}
_OWN = {"estimate": "sizing"}


def __getattr__(name: str) -> Any:
    """Imported when asked for: the daemon and the trainer's contract do without."""
    if name not in _HOMES and name not in _OWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = f"client.{_HOMES[name]}" if name in _HOMES else _OWN[name]
    return getattr(import_module(f"broker.{home}"), name)
