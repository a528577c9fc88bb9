"""Browser without JavaScript for tests: cookies, forms, and the headers that a browser sends."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp

from tests.api.harness import Running

OWN = {"Sec-Fetch-Site": "same-origin"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    text: str
    headers: Mapping[str, str]

    @property
    def location(self) -> str:
        return self.headers.get("Location", "")


class Visitor:
    def __init__(self, api: Running) -> None:
        self.api = api
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    @property
    def cookies(self) -> dict[str, str]:
        return {cookie.key: cookie.value for cookie in self._http.cookie_jar}

    def set_cookie(self, name: str, value: str) -> None:
        self._http.cookie_jar.update_cookies({name: value}, response_url=self._http._build_url(self.api.url))

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self._send("GET", path, headers or {"Sec-Fetch-Site": "none"}, None)

    async def post(self, path: str, headers: Mapping[str, str] = OWN, **fields: str) -> Answer:
        return await self._send("POST", path, headers, fields)

    async def send(self, path: str, **fields: str) -> Answer:
        """Send a form as a browser without JavaScript does."""
        return await self._send("POST", path, OWN, fields)

    async def htmx(self, path: str, **fields: str) -> Answer:
        """Send a form as htmx does."""
        return await self._send("POST", path, {**OWN, "HX-Request": "true"}, fields)

    async def upload(self, path: str, name: str, content: bytes, **fields: str) -> Answer:
        """Send a form with a file, the fields first."""
        data = aiohttp.FormData(fields, default_to_multipart=True)
        data.add_field("file", content, filename=name)
        return await self._send("POST", path, OWN, data)

    async def raw(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send a body that no form produces."""
        return await self._send("POST", path, headers, body)

    async def _send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        data: Mapping[str, str] | aiohttp.FormData | bytes | None,
    ) -> Answer:
        url = self.api.url + path
        async with self._http.request(method, url, headers=headers, data=data, allow_redirects=False) as response:
            return Answer(status=response.status, text=await response.text(), headers=response.headers.copy())

    async def sign_in(self, token: Mapping[str, str]) -> None:
        answer = await self.post("/ui/sign-in", token=token["Authorization"].removeprefix("Bearer "))
        assert answer.status == 303, answer.text
