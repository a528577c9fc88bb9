"""Configuration: the file, then the environment, then the command line; a mistake is one line with the key."""

from pathlib import Path
from typing import Any

import pytest

from broker.daemon.app import intervals_of
from broker.daemon.config import DaemonConfig
from broker.domain.errors import InvalidInput


def load(home: Path, text: str) -> DaemonConfig:
    (home / "gpubroker.yaml").write_text(text)
    return DaemonConfig.load(home=home, env={})


def test_the_default_configuration_serves_on_loopback(tmp_path: Path) -> None:
    config = DaemonConfig.load(home=tmp_path, env={})
    assert (config.host, config.database_url) == ("127.0.0.1", None)
    assert config.providers.local is not None
    assert config.providers.simulated is None
    assert config.blobs_url == (tmp_path / "blobs").as_uri()


def test_the_command_line_outranks_environment_and_file(tmp_path: Path) -> None:
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


def test_data_hosts_are_names_or_addresses(tmp_path: Path) -> None:
    hosts = ("data.example.org", "*.example.org", "http://data.internal:8080", "https://[fd00::1]:8443")
    assert load(tmp_path, f"data_hosts: {list(hosts)}").data_hosts == hosts


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 1", "prot: unknown key; did you mean port?"),
        ("intervals: {poll_s: -1}", "intervals.poll_s"),
        ("providers: {simulated: {sede: 1}}", "providers.simulated.sede"),
        ("data_hosts: ['https://']", "data_hosts.0: must be a host without a port"),
        ("data_hosts: ['http://a:b']", "data_hosts.0: must be a host without a port"),
        ("data_hosts: ['http://a:99999']", "data_hosts.0: must be a host without a port"),
        ("data_hosts: ['data.example.org:8443']", "data_hosts.0: must be a host without a port"),
        ("- a list", "gpubroker.yaml:1: must be a mapping"),
        ("a: [", "gpubroker.yaml:1: not YAML"),
        (
            "port: 1\nlimits:\n  heartbeat_s: 5\n  poll_s: 5\n  heartbeat_s: 6\n",
            "gpubroker.yaml:5: limits.heartbeat_s: the key is",
        ),
    ],
)
def test_a_mistake_names_the_key_and_the_file(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path, text)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("env", "options", "told"),
    [
        ({}, {"port": 80_000}, "--port: must be less than or equal to 65535, not 80000"),
        (
            {},
            {"host": "0.0.0.0"},
            "--host: 0.0.0.0 is not a loopback address; give tls.certificate and tls.key, or use",
        ),
        ({"GPUBROKER_LOG_LEVEL": "LOUD"}, {}, "GPUBROKER_LOG_LEVEL: must be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
        ({"GPUBROKER_BLOBS": "nope"}, {}, "GPUBROKER_BLOBS: 'nope': not one of file://, memory://"),
    ],
)
def test_a_mistake_of_an_option_or_a_variable_names_that(
    tmp_path: Path, env: dict[str, str], options: dict[str, Any], told: str
) -> None:
    """The message names the option or the variable, with any value of the same key in the file."""
    (tmp_path / "gpubroker.yaml").write_text("port: 1\nhost: 127.0.0.1\nblobs: memory://\nlog_level: INFO\n")
    with pytest.raises(InvalidInput) as caught:
        DaemonConfig.load(home=tmp_path, env=env, **options)
    assert told in str(caught.value)
    assert "gpubroker.yaml" not in str(caught.value)


def test_an_unknown_home_directory_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidInput, match=r"--home: ~nobody-of-this-name: there is no such user"):
        DaemonConfig.load(home=Path("~nobody-of-this-name"), env={})


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nope", "not one of file://, memory://, s3://, gs://, az://; a folder is written file:///absolute/path"),
        ("s3://", "names no bucket; write s3://bucket/prefix"),
        ("az:///prefix", "names no bucket; write az://bucket/prefix"),
        ("file:data", "a folder needs an absolute path"),
        ("s3://[bucket", "Invalid IPv6 URL; write"),
    ],
)
def test_a_store_that_cannot_be_is_named_with_its_key_and_the_file(tmp_path: Path, url: str, told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path, f'blobs: "{url}"')
    assert str(caught.value).startswith(f"blobs: '{url}': {told}")
    assert str(caught.value).endswith(f"(in {tmp_path / 'gpubroker.yaml'})")


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
    assert intervals_of(rented).creates == 3
    assert intervals_of(DaemonConfig(home=tmp_path)).creates == 32
