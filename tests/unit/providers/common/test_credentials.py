"""Keys are found where the clouds' own tools keep them, and are never shown."""

import tomllib
from pathlib import Path

import pytest

from broker.domain.errors import Rejected
from providers.common.credentials import aws_source, key_of, sky_env, sky_files

KEY = "test-key-0123"


def write(home: Path, name: str, text: str) -> None:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("cloud", "file", "text"),
    [
        ("runpod", ".runpod/config.toml", f'[default]\napi_key = "{KEY}"\n'),
        ("vast", ".config/vastai/vast_api_key", KEY + "\n"),
        ("vast", ".vast_api_key", KEY),
        ("lambda", ".lambda_cloud/lambda_keys", f"# mine\napi_key = {KEY}\n"),
        ("lambda", ".lambda_cloud/lambda_keys", f"api_key={KEY}\n"),
    ],
)
def test_file_of_the_clouds_own_tool(tmp_path: Path, cloud: str, file: str, text: str) -> None:
    write(tmp_path, file, text)
    found = key_of(cloud, {}, tmp_path)
    assert (found.key, found.source) == (KEY, f"~/{file}")
    assert KEY not in repr(found)


@pytest.mark.parametrize("cloud", ["runpod", "vast", "lambda"])
def test_environment_wins(tmp_path: Path, cloud: str) -> None:
    variable = f"{cloud.upper()}_API_KEY"
    for name, data in sky_files(cloud, {variable: "in-file"}, tmp_path).items():
        write(tmp_path, name, data.decode())
    assert key_of(cloud, {}, tmp_path).key == "in-file"
    found = key_of(cloud, {variable: f" {KEY}\n"}, tmp_path)
    assert (found.key, found.source) == (KEY, variable)


@pytest.mark.parametrize(("cloud", "page"), [("runpod", "runpod.io"), ("vast", "vast.ai"), ("lambda", "lambda.ai")])
def test_missing_key_names_cloud_and_cure(tmp_path: Path, cloud: str, page: str) -> None:
    with pytest.raises(Rejected) as e:
        key_of(cloud, {}, tmp_path)
    said = str(e.value)
    assert "\n" not in said
    assert cloud in said.lower()
    assert "no API key" in said
    assert f"https://{page}" in said.replace("www.console.", "").replace("cloud.", "")
    assert f"{cloud.upper()}_API_KEY" in said


@pytest.mark.parametrize(
    ("cloud", "file", "text"),
    [
        ("runpod", ".runpod/config.toml", f"api_key: {KEY}"),
        ("runpod", ".runpod/config.toml", f'[other]\napi_key = "{KEY}"'),
        ("runpod", ".runpod/config.toml", "[default]\napi_key = 7"),
        ("runpod", ".runpod/config.toml", "default = 7"),
        ("vast", ".config/vastai/vast_api_key", "\n"),
        ("vast", ".config/vastai/vast_api_key", "{'error': 'not logged in'}"),
        ("lambda", ".lambda_cloud/lambda_keys", "secret"),
    ],
)
def test_unusable_file_is_named_and_not_quoted(tmp_path: Path, cloud: str, file: str, text: str) -> None:
    write(tmp_path, file, text)
    with pytest.raises(Rejected) as e:
        key_of(cloud, {}, tmp_path)
    said = str(e.value)
    assert file in said
    assert "\n" not in said
    assert KEY not in said
    assert "not logged in" not in said


def test_sky_home_holds_what_each_tool_reads(tmp_path: Path) -> None:
    env = {"RUNPOD_API_KEY": "r-key", "VAST_API_KEY": "v-key", "LAMBDA_API_KEY": "l-key"}
    files = {name: data for cloud in env for name, data in sky_files(cloud[:-8].lower(), env, tmp_path).items()}
    assert tomllib.loads(files[".runpod/config.toml"].decode()) == {"default": {"api_key": "r-key"}}
    assert files[".config/vastai/vast_api_key"] == b"v-key"
    # As SkyPilot's own parser splits it: " = ".
    assert files[".lambda_cloud/lambda_keys"].decode().strip().split(" = ") == ["api_key", "l-key"]
    assert sky_env(["runpod", "vast", "lambda"], env, tmp_path) == {}


def test_aws_may_do_without_files_and_no_other_cloud_without_a_key(tmp_path: Path) -> None:
    assert sky_files("aws", {}, tmp_path) == {}
    with pytest.raises(Rejected, match="no API key"):
        sky_files("vast", {"RUNPOD_API_KEY": KEY}, tmp_path)


def test_aws_files_are_copied_and_variables_passed(tmp_path: Path) -> None:
    write(tmp_path, "elsewhere/keys", "[default]\n")
    write(tmp_path, ".aws/config", "[default]\nregion = eu-west-1\n")
    write(tmp_path, ".aws/sso/cache/abc.json", "{}")
    env = {"AWS_SHARED_CREDENTIALS_FILE": "~/elsewhere/keys", "AWS_PROFILE": "p", "HOME": "x"}
    assert sky_files("aws", env, tmp_path) == {
        ".aws/credentials": b"[default]\n",
        ".aws/config": b"[default]\nregion = eu-west-1\n",
        ".aws/sso/cache/abc.json": b"{}",
    }
    # The place of a file that was copied would lead the server out of its own home.
    assert sky_env(["aws"], env, tmp_path) == {"AWS_PROFILE": "p"}
    assert sky_env(["vast"], env, tmp_path) == {}


def test_the_source_of_aws_keys_is_named_in_order(tmp_path: Path) -> None:
    assert aws_source({}, tmp_path) is None
    write(tmp_path, ".aws/credentials", "[default]\n")
    assert aws_source({}, tmp_path) == "~/.aws/credentials"
    assert aws_source({"AWS_ACCESS_KEY_ID": "AKIA"}, tmp_path) == "AWS_ACCESS_KEY_ID"
