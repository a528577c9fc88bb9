"""URLs of blob stores."""

from urllib.parse import urlsplit

from broker.domain.errors import InvalidInput, Problem

BUCKETS = ("s3", "gs", "az")
SCHEMES = ("file", "memory", *BUCKETS)


def scheme_of(url: str) -> str:
    """Return one of SCHEMES.

    Raises InvalidInput for a URL that no blob store can have.
    """
    try:
        parts = urlsplit(url)
    except ValueError as e:
        raise InvalidInput(bad_url(url, f"{e}; write s3://bucket/prefix or file:///absolute/path")) from None
    if parts.scheme not in SCHEMES:
        known_schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise InvalidInput(bad_url(url, f"not one of {known_schemes}; a folder is written file:///absolute/path"))
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise InvalidInput(bad_url(url, "a folder needs an absolute path; write file:///absolute/path"))
    if parts.scheme in BUCKETS and not parts.netloc:
        raise InvalidInput(bad_url(url, f"names no bucket; write {parts.scheme}://bucket/prefix"))
    return parts.scheme


def bad_url(url: str, message: str) -> Problem:
    return Problem(field="blobs", message=f"{url!r}: {message}")
