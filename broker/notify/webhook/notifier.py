"""Webhook notifier: one signed POST per delivery, to public addresses over HTTPS only."""

import json
import ssl
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from broker.domain.errors import ChannelRefused, InvalidInput, NotDelivered, Problem, RetryAfter
from broker.domain.notifications import Channel, Delivery, JobSnapshot
from broker.notify.webhook.body import body
from broker.notify.webhook.signature import headers, new_secret
from broker.ports import Clock, Settings, State
from broker.runtime.network.address_guard import NOT_PUBLIC, public, public_socket
from broker.runtime.secret_box import SecretBox

URL_CHARACTERS = 2000
ANSWER_BYTES = 64 * 1024
"""Bytes of an answer that are read."""
CONNECT_S = 5.0
TOTAL_S = 15.0
"""Maximum seconds of a delivery, however slowly the receiver answers."""
IDLE_S = 30.0
"""Seconds for which an unused connection stays open."""
ROTATION_S = 24 * 3600.0
"""Seconds for which the previous secret stays valid after a rotation."""
GONE = 410
BUSY = frozenset({429, 503})
"""Statuses whose Retry-After is obeyed."""


class WebhookNotifier:
    """`ports.Notifier` for webhooks.

    `insecure_hosts`: hosts that may have any address and use plain HTTP. `resolver`, `tls` None: the system's.
    """

    kind = "webhook"
    refresh_s: float | None = None

    def __init__(
        self,
        box: SecretBox,
        clock: Clock,
        *,
        user_agent: str = "gpubroker",
        insecure_hosts: Sequence[str] = (),
        resolver: AbstractResolver | None = None,
        tls: ssl.SSLContext | None = None,
        total_s: float = TOTAL_S,
    ) -> None:
        self._box = box
        self._clock = clock
        self._agent = user_agent
        self._insecure = frozenset(host.lower() for host in insecure_hosts)
        self._resolver = resolver
        self._tls: ssl.SSLContext | bool = tls if tls is not None else True
        self._total_s = total_s
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._opened: dict[bytes, Mapping[str, str]] = {}

    # ------------------------------------------------------------------------------------------------------ settings

    def check(self, config: Mapping[str, Any], secrets: Mapping[str, str]) -> Settings:
        """Return the settings to store.

        The URL is a secret, because many receivers put a token in it; only its host is shown.
        """
        known_settings = {"url"}
        faults = [
            Problem(field=f"{part}.{name}", message="a webhook has no such setting; leave it out")
            for part, values, names in (("config", config, ()), ("secrets", secrets, known_settings))
            for name in values
            if name not in names
        ]
        url = secrets.get("url", "")
        fault = self._url_fault(url)
        if fault:
            faults.append(Problem(field="secrets.url", message=fault))
        if faults:
            raise InvalidInput(*faults)
        return {"host": _host(URL(url))}, {"url": url}

    def _url_fault(self, text: str) -> str | None:
        try:
            url = URL(text)
        except ValueError:
            return "is not a URL; give https://host/path"
        host = (url.host or "").lower()
        if len(text) > URL_CHARACTERS or not text.isprintable() or " " in text or not host:
            return f"is not a URL of at most {URL_CHARACTERS} characters; give https://host/path"
        if url.user is not None or url.password is not None or url.fragment:
            return "has credentials or a fragment in it; leave them out"
        if host in self._insecure:
            return None if url.scheme in ("http", "https") else "is neither https nor http"
        if url.scheme != "https":
            return f"is not https; give an https URL, or name {host} under notify.insecure_hosts of the daemon"
        if (host.replace(".", "").isdigit() or ":" in host) and not public(host):
            return f"{host} is not a public address; name it under notify.insecure_hosts of the daemon if it is yours"
        return None

    def fresh(self, secrets: Mapping[str, str]) -> tuple[Mapping[str, str], str | None]:
        """Return secrets with a new signing secret. The previous one stays valid for a day."""
        renewed = {**secrets, "signing": new_secret()}
        if "signing" in secrets:
            until = self._clock.now().timestamp() + ROTATION_S
            renewed |= {"previous": secrets["signing"], "previous_until": str(int(until))}
        return renewed, renewed["signing"]

    # ------------------------------------------------------------------------------------------------------ delivering

    async def deliver(
        self, channel: Channel, delivery: Delivery, snapshot: JobSnapshot | None, state: State | None
    ) -> State | None:
        """Send one delivery. Raises NotDelivered, RetryAfter, ChannelRefused."""
        secrets = self._secrets(channel)
        url = URL(secrets["url"])
        host = _host(url)
        # the daemon's configuration may have changed since the channel was added
        if fault := self._url_fault(secrets["url"]):
            raise NotDelivered(f"the URL at {host} {fault}")
        content = body(delivery, snapshot)
        now = int(self._clock.now().timestamp())
        signed = headers(self._signing(secrets, now), delivery.id, now, content)
        try:
            async with self._session(url).post(url, data=content, headers=signed, allow_redirects=False) as answer:
                await self._drain(answer)
                self._judge(answer, host)
        except TimeoutError:
            raise NotDelivered(f"{host} did not answer within {self._total_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NotDelivered(f"{host}: {_error_message(error)}") from None
        return state

    def _secrets(self, channel: Channel) -> Mapping[str, str]:
        """Return a channel's decrypted secrets. Raises SecretsError."""
        sealed = channel.sealed or b""
        if sealed not in self._opened:
            if len(self._opened) >= 256:
                self._opened.clear()
            self._opened[sealed] = json.loads(self._box.open(sealed))
        return self._opened[sealed]

    def _signing(self, secrets: Mapping[str, str], now: int) -> list[str]:
        valid = [secrets["signing"]]
        if int(secrets.get("previous_until", 0)) > now:
            valid.append(secrets["previous"])
        return valid

    def _session(self, url: URL) -> aiohttp.ClientSession:
        """Return the session for `insecure_hosts`, which connects to any address, or the one for public addresses."""
        anywhere = (url.host or "").lower() in self._insecure
        if anywhere not in self._sessions:
            connector = aiohttp.TCPConnector(
                resolver=self._resolver,
                ssl=self._tls,
                keepalive_timeout=IDLE_S,
                limit_per_host=32,
                socket_factory=None if anywhere else public_socket,
            )
            self._sessions[anywhere] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=self._total_s, sock_connect=CONNECT_S),
                headers={"Content-Type": "application/json", "User-Agent": self._agent},
            )
        return self._sessions[anywhere]

    async def _drain(self, answer: aiohttp.ClientResponse) -> None:
        """Read an answer, so that its connection can be reused. Close the connection after ANSWER_BYTES."""
        left = ANSWER_BYTES
        while left > 0 and (piece := await answer.content.read(left)):
            left -= len(piece)
        if left <= 0:
            answer.close()

    def _judge(self, answer: aiohttp.ClientResponse, host: str) -> None:
        status = answer.status
        if 200 <= status < 300:
            return
        if status == GONE:
            raise ChannelRefused(f"{host} answered 410: it wants no more webhooks")
        pause = _pause_s(answer.headers.get("Retry-After"), self._clock.now()) if status in BUSY else None
        if pause is not None:
            raise RetryAfter(f"{host} answered {status}: come back in {pause:.0f} s", pause)
        redirect = "; redirects are not followed, give the final URL" if 300 <= status < 400 else ""
        raise NotDelivered(f"{host} answered {status}{redirect}")

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


def _host(url: URL) -> str:
    """Return the host, with the port unless it is the scheme's default."""
    return url.authority.lower() if url.explicit_port else (url.host or "").lower()


def _pause_s(header: str | None, now: datetime) -> float | None:
    """Return the seconds of a Retry-After header, which is a number or a date; None if absent or invalid."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(min(int(header.strip()[:9]), 86_400))
    try:
        when = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - now).total_seconds())


def _error_message(error: BaseException) -> str:
    """Return an error's text without the URL, which may hold a token."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is refused: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        if NOT_PUBLIC in str(error.os_error):  # do not reveal the address of a host inside the network
            return "it has no public address; name it under notify.insecure_hosts of the daemon if it is yours"
        return error.os_error.strerror or type(error.os_error).__name__
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer"
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__
