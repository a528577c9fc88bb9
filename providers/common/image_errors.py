"""Recognise from docker's messages that a registry refused an image."""

import re

IMAGE_FIX = "check trainer.image and its login"
_REFUSED = re.compile(
    r"manifest unknown|manifest for \S+ not found|pull access denied|repository \S+ not found|name unknown|"
    r"no matching manifest|invalid reference format|requested access to the resource is denied|"
    r"error response from daemon: (denied|unauthorized)|/v2/\S* (denied|unauthorized|forbidden)|"
    r"unauthorized: (authentication required|incorrect username)|no basic auth credentials|"
    r"failed to resolve reference [^;]*: not found",
    re.I,
)
"""Answers of the registry about the image or its login. A time-out, full disk or rate limit may affect one host."""


def image_refused(message: str) -> bool:
    """Return True if the registry itself refuses the image, so that another machine would fail too."""
    return _REFUSED.search(message) is not None
