"""A registry's own refusal differs from an error that one host, or one moment, may have caused."""

import pytest

from providers.common.machine_task import image_refused

DAEMON = "Error response from daemon: "


@pytest.mark.parametrize(
    "said",
    [
        DAEMON + "manifest for ghcr.io/me/trainer@sha256:00 not found: manifest unknown: manifest unknown",
        DAEMON + "pull access denied for me/trainer, repository does not exist or may require 'docker login'",
        DAEMON + 'Head "https://ghcr.io/v2/me/trainer/manifests/sha256:00": denied',
        DAEMON + 'Head "https://ghcr.io/v2/me/trainer/manifests/sha256:00": unauthorized',
        DAEMON + "unauthorized: authentication required",
        DAEMON + 'Get "https://r.example/v2/": unauthorized: incorrect username or password',
        DAEMON + "denied: Permission artifactregistry.repositories.downloadArtifacts denied on resource",
        DAEMON + 'Head "https://1.dkr.ecr.us-east-1.amazonaws.com/v2/x/manifests/1": no basic auth credentials',
        DAEMON + "no matching manifest for linux/amd64 in the manifest list entries",
        "invalid reference format: repository name must be lowercase",
    ],
)
def test_a_refusal_of_the_registry_is_recognised(said: str) -> None:
    assert image_refused(f"cannot pull ghcr.io/me/trainer; check trainer.image (output: {said})")


@pytest.mark.parametrize(
    "said",
    [
        "",
        DAEMON + 'Get "https://ghcr.io/v2/": dial tcp: lookup ghcr.io: i/o timeout',
        DAEMON + 'Get "https://ghcr.io/v2/": context deadline exceeded',
        DAEMON + "toomanyrequests: You have reached your pull rate limit",
        "failed to register layer: write /usr/lib/x.so: no space left on device",
        "permission denied while trying to connect to the Docker daemon socket",
        "docker does not answer; this kind of machine cannot run an image",
        "received unexpected HTTP status: 503 Service Unavailable",
        "AuthenticationError: Unauthorized request, please check your API key",
    ],
)
def test_a_host_or_a_moment_is_at_fault(said: str) -> None:
    assert not image_refused(f"cannot pull ghcr.io/me/trainer; check trainer.image (output: {said})")
