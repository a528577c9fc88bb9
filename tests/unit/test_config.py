"""Configuration: the file, then the environment, then the command line; a mistake is one line with the key."""

from pathlib import Path

import pytest

from broker.app import rhythm_of
from broker.config import DaemonConfig
from broker.domain.errors import InvalidInput


def load(home: Path, text: str) -> DaemonConfig:
    (home / "gpubroker.yaml").write_text(text)
    return DaemonConfig.load(home=home, env={})


def test_without_anything_it_serves_this_machine_on_loopback(tmp_path: Path) -> None:
    config = DaemonConfig.load(home=tmp_path, env={})
    assert (config.host, config.database_url) == ("127.0.0.1", None)
    assert config.providers.local is not None
    assert config.providers.simulated is None
    assert config.blobs_url == (tmp_path / "blobs").as_uri()


def test_the_environment_beats_the_file_and_the_command_line_beats_both(tmp_path: Path) -> None:
    (tmp_path / "gpubroker.yaml").write_text("database_url: postgresql://file/x\nport: 1\n")
    env = {"GPUBROKER_DATABASE_URL": "postgresql://env/x"}
    config = DaemonConfig.load(home=tmp_path, env=env, port=2)
    assert (config.database_url, config.port) == ("postgresql://env/x", 2)


def test_a_named_file_stays_with_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBROKER_HOME", str(tmp_path / "default"))
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "other.yaml"
    file.write_text("home: ~/theirs\n")
    assert DaemonConfig.load(file, home=None, env={}).home == tmp_path / "theirs"
    assert DaemonConfig.load(file, home=tmp_path / "given", env={}).home == tmp_path / "given"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 1", "prot: unknown key; did you mean port?"),
        ("rhythm: {poll_s: -1}", "rhythm.poll_s"),
        ("providers: {simulated: {sede: 1}}", "providers.simulated.sede"),
        ("- a list", "gpubroker.yaml:1: must be a mapping"),
        ("a: [", "gpubroker.yaml:1: not YAML"),
        ("port: 1\nlimits:\n  beat_s: 5\n  poll_s: 5\n  beat_s: 6\n", "gpubroker.yaml:5: limits.beat_s: the key is"),
    ],
)
def test_a_mistake_names_the_key_and_the_file(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path, text)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_read_by_the_rules_of_specs(tmp_path: Path) -> None:
    """YAML 1.1 had `10:30` for 630, and `on` for true."""
    assert load(tmp_path, "# nothing is set\n") == load(tmp_path, "")
    config = load(tmp_path, "notify: {digest: {at: 10:30, weekly: off}}\ngrpc: {reflection: on}\n")
    assert str(config.notify.digest.at) == "10:30:00"
    assert (config.notify.digest.weekly, config.grpc.reflection) == (False, True)


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not exist"):
        DaemonConfig.load(tmp_path / "absent.yaml", home=tmp_path, env={})


def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"host: caf\xe9\n")
    for file, words in (("latin.yaml", "not UTF-8"), ("", "Is a directory")):
        with pytest.raises(InvalidInput, match=words):
            DaemonConfig.load(tmp_path / file, home=tmp_path, env={})


def test_credentials_are_not_repeated_in_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path, "blob_options: {aws_secret_access_key: 70707}")
    assert "70707" not in str(caught.value)


def test_credentials_of_the_store_are_not_shown(tmp_path: Path) -> None:
    assert "hush" not in repr(load(tmp_path, "blob_options: {aws_secret_access_key: hush}"))


def test_no_more_creates_are_sent_than_skypilot_launches_at_once(tmp_path: Path) -> None:
    rented = DaemonConfig.model_validate({"home": tmp_path, "providers": {"runpod": {}, "sky": {"launches": 3}}})
    assert rhythm_of(rented).creates == 3
    assert rhythm_of(DaemonConfig(home=tmp_path)).creates == 32
