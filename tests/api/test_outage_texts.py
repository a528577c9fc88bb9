"""Errors of the database and the blob store: the log has the reason, the caller gets a sentence."""

import pytest

from broker.api.core.status_codes import public_text
from broker.domain.errors import BlobsUnavailable, GpubrokerError, StoreError, StoreUnavailable
from tests.api.harness import Running

SECRET = 'relation "tokens" at db.internal:5432 as gpubroker'


@pytest.mark.parametrize("kind", [StoreUnavailable, StoreError, BlobsUnavailable])
async def test_a_raw_database_error_reaches_the_log_alone(
    api: Running, kind: type[GpubrokerError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise kind(SECRET)

    me = await api.token("ada")
    monkeypatch.setattr(api.service.store, "token", fail)
    answer = await api.call("GET", "/v1/jobs", me, 500 if kind is StoreError else 503)
    assert SECRET not in str(answer)
    assert SECRET in caplog.text
    assert answer["detail"] == public_text(kind(SECRET))
