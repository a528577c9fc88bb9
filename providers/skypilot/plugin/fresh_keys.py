"""Keys as they lie in the server's home now: a worker lives for many requests, and three clients read theirs once."""

import sys
from typing import Any

from providers.skypilot.plugin.patch import Replacement


def fresh_keys(original: Replacement) -> Replacement:
    """Before each request. SkyPilot itself drops AWS's session with the request."""

    def override_request_env_and_config(*args: Any, **kwargs: Any) -> Any:
        if (adaptor := sys.modules.get("sky.adaptors.vast")) is not None:
            adaptor._vast_sdk = None  # type: ignore[attr-defined]
        if (runpod := sys.modules.get("runpod")) is not None:
            runpod.api_key = (runpod.get_credentials(runpod.profile) or {}).get("api_key")  # type: ignore[attr-defined]
        if (machines := sys.modules.get("sky.provision.lambda_cloud.instance")) is not None:
            machines._lambda_client = None  # type: ignore[attr-defined]
        return original(*args, **kwargs)

    return override_request_env_and_config
