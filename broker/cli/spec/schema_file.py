"""The JSON Schema of a job's spec: printed by `gpubroker schema`, and stored for editors by `gpubroker init`."""

import json
from pathlib import Path

from broker.client.transport import connection
from broker.domain.spec import JobSpec

NAME = "spec.schema.json"


def json_schema() -> str:
    """Return the schema as a JSON text."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**head, **JobSpec.model_json_schema()}, indent=2) + "\n"


def store_schema() -> Path | None:
    """Write the schema next to the stored login, where an editor finds it; None if that folder cannot be written."""
    file = connection.login_file().parent / NAME
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text(json_schema())
    except OSError:
        return None
    return file
