"""Settings of a Slack channel: the conversation, and the app's secrets."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from broker.domain.errors import InvalidInput, Problem
from broker.ports import Settings
from broker.runtime.secret_box import SecretBox

CONVERSATION = re.compile(r"[CG][A-Z0-9]{2,30}")
SECRET_MAX = 512
FORMS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "bot_token": (re.compile(r"xoxb-[\w-]+"), "starts with xoxb-; OAuth & Permissions of the app shows it"),
    "signing_secret": (re.compile(r"[!-~]{16,}"), "is on the app's page Basic Information"),
    "app_token": (re.compile(r"xapp-[\w-]+"), "starts with xapp-; Basic Information, App-Level Tokens"),
}
REQUIRED = ("bot_token",)


@dataclass(frozen=True, kw_only=True)
class Secrets:
    """Decrypted secrets of one Slack app."""

    bot_token: str = field(repr=False)
    signing_secret: str = field(default="", repr=False)
    """Secret that verifies Slack's requests over HTTP; empty: no requests are accepted."""
    app_token: str = field(default="", repr=False)
    """Token for Socket Mode; empty: Socket Mode is not used."""

    @classmethod
    def opened(cls, box: SecretBox, sealed: bytes | None) -> Self:
        """Return decrypted secrets. Raises SecretsError if another master key encrypted them."""
        values = json.loads(box.open(sealed)) if sealed is not None else {}
        return cls(**{"bot_token": ""} | {name: str(values[name]) for name in FORMS if name in values})


def check(config: Mapping[str, Any], secrets: Mapping[str, str]) -> Settings:
    """Return the settings to store. Raises InvalidInput with every fault."""
    faults = [_unknown(f"config.{key}", "channel") for key in config if key != "channel"]
    faults += [_unknown(f"secrets.{name}", ", ".join(FORMS)) for name in secrets if name not in FORMS]
    conversation = config.get("channel")
    if not isinstance(conversation, str) or not CONVERSATION.fullmatch(conversation):
        message = "give the id of the Slack channel, as C0123ABCDEF; its details in Slack show it, at the end"
        faults.append(Problem(field="config.channel", message=message))
    for name, (form, where) in FORMS.items():
        value = secrets.get(name, "")
        if not value and name not in REQUIRED:
            continue
        if len(value) > SECRET_MAX or not form.fullmatch(value):
            faults.append(Problem(field=f"secrets.{name}", message=f"is missing or malformed; it {where}"))
    if faults:
        raise InvalidInput(*faults)
    return {"channel": conversation}, {name: value for name, value in secrets.items() if value}


def _unknown(field: str, known_names: str) -> Problem:
    return Problem(field=field, message=f"unknown; remove it, or use {known_names}")
