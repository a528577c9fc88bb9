"""A cloned spec, written as YAML, loads as the same spec with any texts."""

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from broker.api.schemas.quotes import QuoteSpec
from broker.cli.spec.spec_file import load
from broker.cli.spec.spec_yaml import spec_yaml

HOSTILE = st.sampled_from(["1e3", "0o7", "yes", "null", "~", "a: b", "# no", "-", "1_0", "0x1", ".inf", "="])
TEXTS = HOSTILE | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    | st.sampled_from("\x1b\n\r\t\x85\u2028\u202e '\"\\"),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["1e5", "1e3", "null", "true", "a-b"]), words=st.lists(TEXTS, min_size=1, max_size=4))
@example(name="1e5", words=["1e3", "printf '\x1b[31m'\necho\ttwo \n"])
def test_a_written_spec_loads_as_the_same_spec(tmp_path: Path, name: str, words: list[str]) -> None:
    data: dict[str, Any] = {"cap_usd": "5", "name": name, "resources": {"regions": ["1e3"]}}
    data["script"] = {"code": "upload:" + "0" * 64, "command": words}
    spec = QuoteSpec.model_validate(data)
    written = spec.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    (path := tmp_path / "job.yaml").write_text(spec_yaml(written), encoding="utf-8")
    assert load(path).spec == spec


def test_a_text_shown_on_a_terminal_is_escaped_within_quotes() -> None:
    assert spec_yaml({"name": "a", "command": "b\u202ec\x1b"}).splitlines()[1].startswith('command: "b')
