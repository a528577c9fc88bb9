"""`gpubroker rm --data` shows the cost and asks; `ls` and `watch` show the forecast."""

from asyncio import to_thread
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from broker.api.schemas.job_data import ForecastIntervalView, ForecastView
from broker.cli.core.exit_codes import Exit
from broker.cli.views import job_table, progress
from broker.cli.views import jobs as jobviews
from broker.client.async_client import AsyncClient
from broker.domain.job import JobState, StoredData
from broker.ports import StorageCharge
from tests.cli.conftest import Shell
from tests.cli.test_jobs import end, submitted


async def test_rm_shows_the_storage_cost_and_deletes_only_when_confirmed(shell: Shell) -> None:
    shell.api.service.settings = replace(shell.api.service.settings, storage_usd_per_gib_month=Decimal("0.023"))
    job = await submitted(shell)
    ran = await to_thread(shell.run, "rm", "--data", job, "-y")
    assert ran.code == Exit.BAD_INPUT
    assert "cancel it first" in ran.err
    await end(shell, job, JobState.FAILED)
    measured = datetime.now(UTC) - timedelta(hours=2, minutes=12)
    stored = StoredData(bytes=10 * 2**30, accrued_usd=Decimal("0.5"), charged_usd=Decimal("0.5"), to=measured)
    charge = StorageCharge(job_id=job, read=None, to=stored, usd=stored.charged_usd, due_in_s=60)
    assert await shell.api.service.store.charge_storage(charge)
    ran = await to_thread(shell.run, "rm", job)
    assert ran.code == Exit.BAD_INPUT
    ran = await to_thread(shell.run, "rm", "--data", job)
    assert ran.code == Exit.BAD_INPUT
    assert "stores 10.0 GiB (measured 2 h 12 min ago), $0.2300 a month, $0.5000 so far" in ran.out
    assert "pass -y" in ran.err
    stored_job = await shell.api.service.store.job(job)
    assert stored_job is not None
    assert not stored_job.deleted
    ran = await to_thread(shell.run, "rm", "--data", job, "-k", "logs", "-y", "--json")
    assert ran.code == 0, ran.err
    assert [one["what"] for one in ran.document["storage"]["deleted"]] == ["logs"]
    ran = await to_thread(shell.run, "logs", job)
    assert ran.code == Exit.NOT_FOUND
    assert "were deleted on 20" in ran.err
    ran = await to_thread(shell.run, "get", job)
    assert "already deleted: logs on 20" in ran.out


async def test_a_forecast_is_seen_in_the_list_and_while_watching(shell: Shell) -> None:
    job = await submitted(shell)
    async with AsyncClient(shell.api.url, await _token(shell)) as client:
        detail = await client.job(job)
    assert job_table.forecast(detail).plain == "–"
    assert not jobviews.forecast_message(detail)
    forecast_view = ForecastView(
        usd=Decimal("7.5"), finish_at=datetime(2026, 3, 1, tzinfo=UTC) + timedelta(hours=1), step_s=1.0, over_cap=True,
        late=True,
    )  # fmt: skip
    over = detail.model_copy(update={"forecast": forecast_view})
    assert job_table.forecast(over).style == "red"
    assert jobviews.forecast_message(over) == "$7.5000 by 2026-03-01 01:00 UTC (P50); above the cap; too late"
    interval = ForecastIntervalView(
        usd_low=Decimal("7.25"), usd_high=Decimal(8), finish_earliest=datetime(2026, 3, 1, 0, 55, tzinfo=UTC),
        finish_latest=datetime(2026, 3, 1, 1, 5, tzinfo=UTC),
    )  # fmt: skip
    measured = over.model_copy(update={"forecast": forecast_view.model_copy(update={"interval": interval})})
    shown = "; 90 % interval $7.2500 to $8.0000, 2026-03-01 00:55 to 2026-03-01 01:05 UTC; above the cap; too late"
    assert jobviews.forecast_message(measured).endswith(shown)
    line = progress.view(over).line()
    assert "$7.5000 expected, above the cap" in line
    assert "too late: 2026-03-01 01:00 UTC expected" in line


async def _token(shell: Shell) -> str:
    return (await shell.api.token("local"))["Authorization"].removeprefix("Bearer ")
