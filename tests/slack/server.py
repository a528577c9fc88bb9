"""A Slack on loopback: the Web API's methods that we call, with the errors, limits and scopes that Slack documents.

Tests drive the real slack_sdk against it. `down`, `lose` and `refuse`: the ways in which a network and a service fail.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.slack.blockkit import faults
from tests.slack.limits import Limits
from tests.slack.socket import Sockets

BOT_TOKEN = "xoxb-test-bot"
APP_TOKEN = "xapp-test-app"
WORKSPACE = "T0TEST"
BOT_USER = "U0BOT"
TEXT_MAX = 4000
METADATA_MAX = 8 * 1024
RESPONSES_MAX = 5
"""Number of answers that a response_url accepts."""
ALL_SCOPES = frozenset(
    {"chat:write", "chat:write.public", "channels:history", "groups:history", "files:write", "users:read", "commands"}
)
SCOPES = {
    "chat.delete": ("chat:write",),
    "chat.postEphemeral": ("chat:write",),
    "chat.postMessage": ("chat:write",),
    "chat.update": ("chat:write",),
    "conversations.history": ("channels:history", "groups:history"),
    "conversations.replies": ("channels:history", "groups:history"),
    "files.completeUploadExternal": ("files:write",),
    "files.getUploadURLExternal": ("files:write",),
    "users.info": ("users:read",),
}
"""Scopes by method; any one of a method's scopes suffices."""

Args = Mapping[str, Any]


class Refused(Exception):
    """Raised for an answer of `ok: false` with this error."""

    def __init__(self, error: str, **more: Any) -> None:
        super().__init__(error)
        self.body = {"ok": False, "error": error, **more}


@dataclass
class Channel:
    id: str
    member: bool = True
    public: bool = True
    archived: bool = False
    messages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Messages by ts, threads included, in the order of posting."""


@dataclass
class Slack:
    """State of a workspace, with switches for its faults."""

    now: Callable[[], float] = time.monotonic
    scopes: frozenset[str] = ALL_SCOPES
    url: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(method, arguments) of every call that was answered or lost."""
    down: str = ""
    """`500`: Slack answers with a page of HTML; `reset`: connections are cut; `hang`: no answer comes."""
    lose: set[str] = field(default_factory=set)
    """Methods whose next call is carried out without an answer: the connection is cut."""
    stall: str = ""
    """Method whose next call is carried out and never answered; `stalled` is set then."""
    refuse: dict[str, str] = field(default_factory=dict)
    """Error of every call by method."""

    def __post_init__(self) -> None:
        self.limits = Limits(self.now)
        self.channels = {"C0JOBS": Channel("C0JOBS"), "C0ELSE": Channel("C0ELSE", member=False, public=False)}
        self.users = {"U0ANN": "Ann", "U0BOB": "Bob"}
        self.files: dict[str, dict[str, Any]] = {}
        self.responses: dict[str, list[dict[str, Any]]] = {}
        self.sockets = Sockets()
        self.stalled = asyncio.Event()
        self._ts = itertools.count(1)
        self._ids = itertools.count(1)

    # ------------------------------------------------------------------------------------------------ for tests

    def messages(self, channel: str = "C0JOBS", thread: str | None = None) -> list[dict[str, Any]]:
        """Return roots, or the replies of a thread, in the order of posting."""
        messages = self.channels[channel].messages.values()
        return [m for m in messages if m.get("thread_ts") == thread]

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)

    def response_url(self) -> str:
        name = f"r{next(self._ids)}"
        self.responses[name] = []
        return f"{self.url}/response/{name}"

    # ------------------------------------------------------------------------------------------------ the Web API

    async def api(self, request: web.Request) -> web.StreamResponse:
        method = request.match_info["method"]
        if self.down:
            return await self._broken(request)
        args = await _arguments(request)
        try:
            answer = self._carry_out(method, request.headers.get("Authorization", ""), args)
        except Refused as refused:
            answer = refused.body
            if refused.body["error"] == "ratelimited":
                after = str(refused.body.pop("after", 1))
                return web.json_response(refused.body, status=429, headers={"Retry-After": after})
        if method == self.stall:
            self.stall = ""
            self.stalled.set()
            await asyncio.Event().wait()
        if method in self.lose:
            self.lose.discard(method)
            return _cut(request)
        return web.json_response(answer)

    async def _broken(self, request: web.Request) -> web.StreamResponse:
        if self.down == "hang":
            await asyncio.Event().wait()
        if self.down == "500":
            return web.Response(status=503, text="<html>Service unavailable</html>", content_type="text/html")
        return _cut(request)

    def _carry_out(self, method: str, authorization: str, args: Args) -> dict[str, Any]:
        after = self.limits.retry_after(method, str(args.get("channel", "")))
        if after:
            raise Refused("ratelimited", after=after)
        self.calls.append((method, dict(args)))
        self._authorize(method, authorization.removeprefix("Bearer "))
        if method in self.refuse:
            raise Refused(self.refuse[method])
        handler = METHODS.get(method)
        if handler is None:
            raise Refused("unknown_method", req_method=method)
        return {"ok": True, **handler(self, args)}

    def _authorize(self, method: str, token: str) -> None:
        if not token:
            raise Refused("not_authed")
        if method == "apps.connections.open":
            if token != APP_TOKEN:
                raise Refused("not_allowed_token_type" if token == BOT_TOKEN else "invalid_auth")
            return
        if token != BOT_TOKEN:
            raise Refused("invalid_auth")
        needed = SCOPES.get(method, ())
        if needed and not self.scopes & set(needed):
            raise Refused("missing_scope", needed=needed[0], provided=",".join(sorted(self.scopes)))

    def _channel(self, args: Args, name: str = "channel") -> Channel:
        channel = self.channels.get(str(args.get(name)))
        if channel is None:
            raise Refused("channel_not_found")
        if channel.archived:
            raise Refused("is_archived")
        if not channel.member and not (channel.public and "chat:write.public" in self.scopes):
            raise Refused("not_in_channel")
        return channel

    def _stamp(self) -> str:
        return f"{time.time():.0f}.{next(self._ts):06d}"

    def auth_test(self, args: Args) -> dict[str, Any]:
        return {"url": f"{self.url}/", "team": "Test", "team_id": WORKSPACE, "user": "gpubroker", "user_id": BOT_USER,
                "bot_id": "B0BOT"}  # fmt: skip

    def post_message(self, args: Args) -> dict[str, Any]:
        channel = self._channel(args)
        message = _message(args)
        thread = args.get("thread_ts")
        if thread is not None:
            root = channel.messages.get(thread)
            if root is None or "thread_ts" in root:
                raise Refused("cannot_reply_to_message")
            message["thread_ts"] = thread
        ts = self._stamp()
        channel.messages[ts] = {"type": "message", "ts": ts, "user": BOT_USER, **message}
        return {"channel": channel.id, "ts": ts, "message": channel.messages[ts]}

    def update(self, args: Args) -> dict[str, Any]:
        channel = self._channel(args)
        before = channel.messages.get(str(args.get("ts")))
        if before is None:
            raise Refused("message_not_found")
        if before["user"] != BOT_USER:
            raise Refused("cant_update_message")
        before.update(_message(args))
        return {"channel": channel.id, "ts": before["ts"], "text": before["text"], "message": before}

    def delete(self, args: Args) -> dict[str, Any]:
        channel = self._channel(args)
        if channel.messages.pop(str(args.get("ts")), None) is None:
            raise Refused("message_not_found")
        return {"channel": channel.id, "ts": args["ts"]}

    def history(self, args: Args) -> dict[str, Any]:
        """Return messages, newest first, without replies."""
        roots = [m for m in self._channel(args).messages.values() if "thread_ts" not in m]
        return self._page(args, roots[::-1])

    def replies(self, args: Args) -> dict[str, Any]:
        """Return a thread: the root, then its replies, oldest first."""
        messages = self._channel(args).messages
        root = messages.get(str(args.get("ts")))
        if root is None:
            raise Refused("thread_not_found")
        return self._page(args, [root, *(m for m in messages.values() if m.get("thread_ts") == root["ts"])])

    def _page(self, args: Args, messages: list[dict[str, Any]]) -> dict[str, Any]:
        oldest, start = float(args.get("oldest") or 0), int(args.get("cursor") or 0)
        size = min(int(args.get("limit") or 100), 999)
        page = [m for m in messages if float(m["ts"]) > oldest]
        if str(args.get("include_all_metadata", "0")).lower() not in ("1", "true"):
            page = [{k: v for k, v in m.items() if k != "metadata"} for m in page]
        end = start + size
        more = {"next_cursor": str(end)} if end < len(page) else {"next_cursor": ""}
        return {"messages": page[start:end], "has_more": end < len(page), "response_metadata": more}

    def user_info(self, args: Args) -> dict[str, Any]:
        name = self.users.get(str(args.get("user")))
        if name is None:
            raise Refused("user_not_found")
        profile = {"display_name": name.lower(), "real_name": name}
        user = {"id": args["user"], "team_id": WORKSPACE, "deleted": False, "is_bot": False, "profile": profile}
        return {"user": user}

    def upload_url(self, args: Args) -> dict[str, Any]:
        if not args.get("filename") or int(args.get("length") or 0) <= 0:
            raise Refused("invalid_arguments")
        name = f"F{next(self._ids)}"
        self.files[name] = {"id": name, "name": args["filename"], "length": int(args["length"]), "bytes": None}
        return {"upload_url": f"{self.url}/upload/v1/{name}", "file_id": name}

    async def upload(self, request: web.Request) -> web.StreamResponse:
        """Accept an upload as raw bytes or as the form field `filename`."""
        file = self.files.get(request.match_info["name"])
        if file is None or self.down:
            return web.Response(status=404 if file is None else 503, text="no")
        data = await request.read()
        if len(data) != file["length"]:
            return web.Response(status=400, text="length")
        file["bytes"] = data
        return web.Response(text=f"OK - {len(data)}")

    def complete_upload(self, args: Args) -> dict[str, Any]:
        listed = args.get("files")
        wanted = json.loads(listed) if isinstance(listed, str) else listed or []
        files = [self.files.get(f["id"]) for f in wanted]
        if not files or any(f is None or f["bytes"] is None for f in files):
            raise Refused("file_not_found")
        if args.get("channel_id"):
            channel = self._channel(args, "channel_id")
            shared = [{"id": f["id"], "name": f["name"], "title": w.get("title", "")}
                      for f, w in zip(files, wanted, strict=True) if f]  # fmt: skip
            ts = self._stamp()
            channel.messages[ts] = {"type": "message", "ts": ts, "user": BOT_USER, "files": shared,
                                    "text": args.get("initial_comment", "")}  # fmt: skip
            if args.get("thread_ts"):
                channel.messages[ts]["thread_ts"] = args["thread_ts"]
        return {"files": [{"id": f["id"], "title": f["name"]} for f in files if f]}

    def open_connection(self, args: Args) -> dict[str, Any]:
        return {"url": f"{self.url.replace('http', 'ws')}/link?ticket={self.sockets.ticket()}"}

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer on a response_url, which accepts five answers."""
        responses = self.responses.get(request.match_info["name"])
        if responses is None or len(responses) >= RESPONSES_MAX:
            return web.Response(status=404, text="used_url")
        body = await request.json()
        if wrong := faults(body.get("blocks", [])):
            return web.Response(status=400, text=f"invalid_blocks {wrong}")
        responses.append(body)
        return web.Response(text="ok")


METHODS: Mapping[str, Callable[[Slack, Args], dict[str, Any]]] = {
    "apps.connections.open": Slack.open_connection,
    "auth.test": Slack.auth_test,
    "chat.delete": Slack.delete,
    "chat.postMessage": Slack.post_message,
    "chat.update": Slack.update,
    "conversations.history": Slack.history,
    "conversations.replies": Slack.replies,
    "files.completeUploadExternal": Slack.complete_upload,
    "files.getUploadURLExternal": Slack.upload_url,
    "users.info": Slack.user_info,
}


def _message(args: Args) -> dict[str, Any]:
    """Return the message of a post or an update. Raises Refused."""
    text, blocks, metadata = args.get("text") or "", args.get("blocks"), args.get("metadata")
    if not text and not blocks:
        raise Refused("no_text")
    if len(text) > TEXT_MAX:
        raise Refused("msg_too_long")
    if wrong := faults(blocks or []):
        raise Refused("invalid_blocks", errors=wrong, response_metadata={"messages": wrong})
    if metadata is not None:
        if set(metadata) != {"event_type", "event_payload"}:
            raise Refused("invalid_metadata_format")
        if len(json.dumps(metadata)) > METADATA_MAX:
            raise Refused("metadata_too_large")
    fields = {"text": text, "blocks": blocks, "metadata": metadata}
    return {k: v for k, v in fields.items() if v is not None}


async def _arguments(request: web.Request) -> dict[str, Any]:
    if request.content_type == "application/json":
        body: dict[str, Any] = await request.json()
        return body
    return {**request.query, **dict(await request.post())}


def _cut(request: web.Request) -> web.StreamResponse:
    """End the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response(status=500)


@asynccontextmanager
async def slack(**settings: Any) -> AsyncIterator[Slack]:
    """Yield a workspace that serves until the block ends."""
    state = Slack(**settings)
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/api/{method}", state.api)
    app.router.add_get("/api/{method}", state.api)
    app.router.add_post("/upload/v1/{name}", state.upload)
    app.router.add_post("/response/{name}", state.respond)
    app.router.add_get("/link", state.sockets.link)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield state
    finally:
        await state.sockets.close()
        await runner.cleanup()
