"""What a registry's refusal of an image looks like, by docker's words, whoever has called docker."""

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
"""Answers of the registry about the image or its login. A time-out, a full disk or a rate limit may be one host's."""


def image_refused(said: str) -> bool:
    """Whether the registry itself does not hand the image out: another machine would hear the same."""
    return _REFUSED.search(said) is not None
