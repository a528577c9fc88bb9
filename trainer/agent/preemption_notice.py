"""Preemption notices from the machine's cloud.

AWS publishes them in the instance's metadata service. RunPod sends a signal to the container's first process; in the
trainer's image, this process writes the notice to a file. Vast stops machines without notice. Sources: AWS EC2 user
guide, "Spot Instance interruption notices" and "Retrieve instance metadata" (IMDSv2).
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainer.agent.base.state import AgentState
from trainer.agent.process.container_init import NOTICE
from trainer.contract.documents import Outcome

METADATA = "http://169.254.169.254"
POLL_S = 5.0
FILE_POLL_S = 0.2
"""Seconds between checks of the file; short, because a notice may leave only 5 s."""
ANSWER_S = 1.0
GIVE_UP = 3
"""Consecutive failures from the start after which the service is assumed absent."""
TOKEN_S = 21_600
TOKEN = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
ADVICE = "/latest/meta-data/events/recommendations/rebalance"


class NoAnswer(Exception):
    """The service does not exist, or did not answer in time."""


def endpoint(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the URL of the source in GPUBROKER_NOTICES (`imds`, `first_process` or a URL); None: `off` or unset."""
    setting = env.get("GPUBROKER_NOTICES") or "off"
    return {"off": None, "imds": METADATA, "first_process": NOTICE.as_uri()}.get(setting, setting)


def watching(
    url: str, state: AgentState, *, log: Callable[[str], None], hurry: Callable[[], None]
) -> Coroutine[None, None, None]:
    """Poll the source until cancelled."""
    if url.startswith("file:"):
        return WrittenNotice(Path(unquote(urlsplit(url).path)), state, hurry=hurry).run()
    return Notices(url, state, log=log, hurry=hurry).run()


def _drain_before(state: AgentState, left_s: float, hurry: Callable[[], None]) -> None:
    """Put the notice into the heartbeat and drain this agent without waiting for the broker."""
    state.notice(left_s)
    state.end(Outcome.DRAINED, f"the cloud takes this machine away in {left_s:.0f} s")
    hurry()


class WrittenNotice:
    """Poller of the file with the remaining seconds that the container's first process writes on SIGTERM."""

    def __init__(self, path: Path, state: AgentState, *, hurry: Callable[[], None]) -> None:
        self._path, self._state, self._hurry = path, state, hurry

    async def run(self) -> None:
        """Poll until the file exists, or until cancelled."""
        while not self.once():  # noqa: ASYNC110
            await asyncio.sleep(FILE_POLL_S)

    def once(self) -> bool:
        """Check once for the file."""
        try:
            of_s, written_at = float(self._path.read_text()), self._path.stat().st_mtime
        except (OSError, ValueError):
            return False
        age_s = max(0.0, time.time() - written_at)
        _drain_before(self._state, max(0.0, of_s - age_s), self._hurry)
        return True


class Metadata:
    """Client of IMDSv2, which requires a session token. Uses no proxy; a request takes at most ANSWER_S."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._token: str | None = None

    def read(self, path: str) -> str | None:
        """Return the text at `path`, or None if it does not exist. Blocks. Raises: NoAnswer."""
        for _ in range(2):
            if self._token is None:
                status, text = self._request("PUT", TOKEN, "X-aws-ec2-metadata-token-ttl-seconds", str(TOKEN_S))
                if status != 200:
                    raise NoAnswer(f"no token: HTTP {status}")
                self._token = text
            status, text = self._request("GET", path, "X-aws-ec2-metadata-token", self._token)
            if status != 401:
                break
            self._token = None
        if status not in (200, 404):
            raise NoAnswer(f"HTTP {status}")
        return text if status == 200 else None

    def _request(self, verb: str, path: str, header: str, value: str) -> tuple[int, str]:
        connection = HTTPConnection(self._host, self._port, timeout=ANSWER_S)
        try:
            connection.request(verb, path, headers={header: value})
            answer = connection.getresponse()
            return answer.status, answer.read(65536).decode("utf-8", "replace")
        except (OSError, HTTPException, ValueError) as e:
            raise NoAnswer(str(e)) from None
        finally:
            connection.close()


class Notices:
    """Poller of the metadata service."""

    def __init__(
        self,
        url: str,
        state: AgentState,
        *,
        log: Callable[[str], None],
        hurry: Callable[[], None],
        look_s: float = POLL_S,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._metadata = Metadata(url)
        self._state, self._log, self._hurry = state, log, hurry
        self._look_s, self._now = look_s, now
        self._advised = False

    async def run(self) -> None:
        """Poll until cancelled; return if the service never answers."""
        has_answered, failures = False, 0
        while has_answered or failures < GIVE_UP:
            try:
                await self.once()
                has_answered = True
            except NoAnswer:
                failures += 1
            await asyncio.sleep(self._look_s)

    async def once(self) -> None:
        """Poll once. Raises: NoAnswer."""
        if (text := await asyncio.to_thread(self._metadata.read, ACTION)) is not None:
            self._record_notice(text)
        elif not self._advised and await asyncio.to_thread(self._metadata.read, ADVICE) is not None:
            self._advised = True
            self._log("the cloud advises to move: this machine may be taken away soon")

    def _record_notice(self, text: str) -> None:
        if self._state.gone_at is not None:
            return
        _drain_before(self._state, self._left_s(text), self._hurry)

    def _left_s(self, text: str) -> float:
        """Return seconds until the notice's `time`, or AWS's two minutes if it cannot be parsed."""
        try:
            at = datetime.fromisoformat(json.loads(text)["time"])
            return max(0.0, (at - self._now()).total_seconds())
        except (ValueError, KeyError, TypeError):
            return 120.0
