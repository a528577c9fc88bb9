"""Checks of what a spec refers to: uploads, secrets, providers and accelerators."""

import re
from collections.abc import Mapping, Sequence

from broker.api.core.bounded_cache import BoundedCache, summary_bytes
from broker.domain.errors import InvalidInput, Problem
from broker.domain.instance import Caps
from broker.domain.offer import Offer
from broker.domain.spec import JobSpec
from broker.domain.tenancy import Tenant
from broker.estimator.speed.hardware import TABLE, matches
from broker.ports import TenantStore, Upload
from trainer.contract.suggestions import close_matches, short_list
from trainer.dataset import batch_defaults, example_counts

REFERENCE = re.compile(r"upload:([0-9a-f]{64})")
CACHED, CACHED_BYTES = 1024, 64 << 20
"""Maximum number of uploads whose summaries are kept, and about how much memory these take."""
UPLOAD_FIRST = "upload the file first, as `gpubroker submit` does"


class Inputs:
    """Looks up references. Uploads are cached, because they are content-addressed and never change."""

    def __init__(self) -> None:
        self._uploads: BoundedCache[tuple[str, str, str], Upload] = BoundedCache(CACHED_BYTES, CACHED)

    def reference(self, spec: JobSpec) -> str:
        """Return the sha256 of the upload that a spec names. Raises InvalidInput for any other path."""
        field, path = _reference(spec)
        match = REFERENCE.fullmatch(path)
        if match is None:
            message = f"{path!r} is not an upload; {UPLOAD_FIRST}, and give its upload:<sha256>"
            raise InvalidInput(Problem(field=field, message=message))
        return match[1]

    async def upload(self, store: TenantStore, tenant: Tenant, spec: JobSpec) -> tuple[JobSpec, Upload]:
        """Return (the spec with its data format resolved, its upload). Raises InvalidInput."""
        sha256 = self.reference(spec)
        own = (tenant.team, tenant.owner, sha256)
        upload = self._uploads.get(own) or await self._find(store, own)
        field, _ = _reference(spec)
        if upload is None:
            message = f"no upload {sha256[:12]}... of yours; {UPLOAD_FIRST}"
            raise InvalidInput(Problem(field=field, message=message))
        detected = None if upload.summary is None else upload.summary["format"]
        if not (detected in (None, "tar") if spec.script else detected):
            expected = "a .tar archive of code" if spec.script else "a data set, or an archive of pictures"
            raise InvalidInput(Problem(field=field, message=f"{upload.name} is not {expected}; upload one"))
        return _settled(spec, upload), upload

    async def _find(self, store: TenantStore, own: tuple[str, str, str]) -> Upload | None:
        upload = await store.upload(*own[1:])
        if upload is not None and upload.gone_at is not None:
            return None
        if upload is not None:
            self._uploads.put(own, upload, summary_bytes(upload.summary))
        return upload

    async def secrets(self, store: TenantStore, owner: str, spec: JobSpec) -> list[Problem]:
        """Return a fault for each secret that is not set."""
        if not spec.secrets:
            return []
        known_secrets = await store.secrets(owner, spec.secrets)
        return [
            Problem(field=f"secrets.{i}", message=f"{name} is not set; run gpubroker secret set {name}")
            for i, name in enumerate(spec.secrets)
            if name not in known_secrets
        ]

    def providers(self, spec: JobSpec, caps: Mapping[str, Caps]) -> list[Problem]:
        """Return a fault for each provider that is not configured."""
        return [
            Problem(
                field=f"resources.providers.{i}", message=unknown_name("provider", name, sorted(caps), "configured")
            )
            for i, name in enumerate(spec.resources.providers)
            if name not in caps
        ]

    def accelerators(self, spec: JobSpec, offers: Sequence[Offer]) -> list[Problem]:
        """Return a fault for each accelerator that is neither known nor for sale.

        Without this check, a job with a misspelt accelerator would wait forever.
        """
        names = spec.resources.accelerators
        unknown = [(i, name) for i, name in enumerate(names) if not any(matches(name, listed) for listed in TABLE)]
        if not unknown:
            return []
        listed = sorted({*TABLE, *(offer.accelerator for offer in offers)})
        return [
            Problem(field=f"resources.accelerators.{i}", message=unknown_name("accelerator", name, listed, "known"))
            for i, name in unknown
            if not any(matches(name, k) for k in listed)
        ]


def _reference(spec: JobSpec) -> tuple[str, str]:
    if spec.train is not None:
        return "train.data.path", spec.train.data.path
    assert spec.script is not None
    return "script.code", spec.script.code


def unknown_name(kind: str, name: str, choices: list[str], are: str) -> str:
    """Return `unknown provider 'vest'; did you mean vast?`, or the list of choices if none is similar."""
    nearest = close_matches(name, choices, n=1)
    fix = f"did you mean {nearest[0]}?" if nearest else f"{are} are {short_list(choices) or 'none'}"
    return f"unknown {kind} {short_list([name])!r}; {fix}"


def batched(spec: JobSpec, upload: Upload) -> tuple[JobSpec, str]:
    """Return (the spec with a number for `global_batch: auto`, by the rows of the upload; a message about it)."""
    if spec.train is None or upload.summary is None:
        return spec, ""
    rows = example_counts.count_summary(upload.summary, spec.train.data)
    train, message = batch_defaults.resolve_global_batch(spec.train, rows, spec.resources.nodes)
    return spec.with_train(train), message


def _settled(spec: JobSpec, upload: Upload) -> JobSpec:
    """Return the spec with the data format of its upload. Raises InvalidInput if the spec names another format."""
    if spec.train is None or upload.summary is None:
        return spec
    data, detected = spec.train.data, upload.summary["format"]
    if data.format not in (None, detected):
        message = f"{upload.name} was read as {detected}; remove this, or upload the file again as {data.format}"
        raise InvalidInput(Problem(field="train.data.format", message=message))
    if data.format == detected:
        return spec
    train = spec.train.model_copy(update={"data": data.model_copy(update={"format": detected})})
    return spec.with_train(train)
