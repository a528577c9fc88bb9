"""The statements for receivers in docs/guide/slack-and-webhooks.md are true."""

import json
import re
import time
from pathlib import Path
from typing import Any

from broker.notify.webhook.body import body
from broker.notify.webhook.signature import headers, new_secret
from tests.unit.broker.notify.harness import DELIVERY, SNAPSHOT

PAGE = (Path(__file__).parents[4] / "docs" / "guide" / "slack-and-webhooks.md").read_text("utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_receiver_accepts_only_our_signature() -> None:
    names: dict[str, Any] = {}
    exec(block("python"), names)
    verified = names["verified"]
    secret, other, now = new_secret(), new_secret(), int(time.time())
    content = body(DELIVERY, SNAPSHOT)
    rotated = headers([other, secret], "evt_a_1", now, content)
    assert verified(secret, rotated, content)
    assert verified(other, rotated, content)
    assert not verified(new_secret(), rotated, content)
    assert not verified(secret, rotated, content + b" ")
    assert not verified(secret, rotated | {"webhook-id": "evt_a_2"}, content)
    assert not verified(secret, headers([secret], "evt_a_1", now - 400, content), content)


def test_the_example_of_a_body_has_our_fields() -> None:
    def shape(value: Any) -> Any:
        return (
            {name: shape(one) for name, one in value.items() if name != "detail"} if isinstance(value, dict) else None
        )

    assert shape(json.loads(block("json"))) == shape(json.loads(body(DELIVERY, SNAPSHOT)))


def test_secrets_are_as_long_as_the_standard_wants() -> None:
    """24 to 64 bytes, base64, after `whsec_`; and ours verify with the standard's own example."""
    example = headers(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )
    assert example["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
