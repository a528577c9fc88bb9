"""One AWS identity: the listing half and SkyPilot, which creates, use the credentials of botocore's choice."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from broker.domain.errors import ProviderError
from providers.aws.api import Aws
from providers.common.credentials import aws_environment, aws_source, sky_env, sky_files

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAENVIRONMENT00003", "AWS_SECRET_ACCESS_KEY": "secret"}
FILE = """[default]
aws_access_key_id = AKIAPROFILEDEFAULT00
aws_secret_access_key = secret
[alpha]
aws_access_key_id = AKIAPROFILEALPHA0001
aws_secret_access_key = secret
[beta]
aws_access_key_id = AKIAPROFILEBETA00002
aws_secret_access_key = secret
"""
CONFIG = "[profile alpha]\nregion=us-east-1\n[profile gamma]\naws_access_key_id=AKIACONFIG\naws_secret_access_key=s\n"
DEFAULT, ALPHA, BETA = "AKIAPROFILEDEFAULT00", "AKIAPROFILEALPHA0001", "AKIAPROFILEBETA00002"
CASES: dict[str, tuple[dict[str, str], str]] = {
    "keys": (KEYS, "AWS_ACCESS_KEY_ID"),
    "keys and profile": ({**KEYS, "AWS_PROFILE": "alpha"}, "AWS_ACCESS_KEY_ID"),
    "keys and default profile": ({**KEYS, "AWS_DEFAULT_PROFILE": "beta"}, "AWS_ACCESS_KEY_ID"),
    "keys, token, profile": ({**KEYS, "AWS_SESSION_TOKEN": "t", "AWS_PROFILE": "alpha"}, "AWS_ACCESS_KEY_ID"),
    "profile": ({"AWS_PROFILE": "alpha"}, "AWS_PROFILE"),
    "default profile": ({"AWS_DEFAULT_PROFILE": "beta"}, "AWS_DEFAULT_PROFILE"),
    "both profiles": ({"AWS_PROFILE": "alpha", "AWS_DEFAULT_PROFILE": "beta"}, "AWS_DEFAULT_PROFILE"),
    "empty default profile": ({"AWS_PROFILE": "alpha", "AWS_DEFAULT_PROFILE": ""}, "AWS_PROFILE"),
    "empty keys": ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_PROFILE": "beta"}, "AWS_PROFILE"),
    "secret alone": ({"AWS_SECRET_ACCESS_KEY": "s", "AWS_PROFILE": "alpha"}, "AWS_PROFILE"),
    "config file": ({"AWS_PROFILE": "gamma"}, "AWS_PROFILE"),
    "nothing": ({}, "~/.aws/credentials"),
}
BOTO = """
import json, os, sys, botocore.session
found = []
for env in json.load(sys.stdin):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(env)
    try:
        credentials = botocore.session.Session().get_credentials()
        found.append(credentials and credentials.access_key)
    except Exception as e:
        found.append(type(e).__name__)
print(json.dumps(found))
"""


def by_botocore(home: Path, environments: list[dict[str, str]]) -> list[str | None]:
    """Return the key that botocore itself chooses in each environment, as SkyPilot's workers call it."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home)}
    asked = json.dumps([{"AWS_EC2_METADATA_DISABLED": "true"} | environment for environment in environments])
    done = subprocess.run(
        [sys.executable, "-c", BOTO], env=env, input=asked, capture_output=True, text=True, check=True
    )
    found: list[str | None] = json.loads(done.stdout)
    return found


async def native(env: Mapping[str, str], home: Path) -> str | None:
    aws = Aws(None, env={"AWS_EC2_METADATA_DISABLED": "true", **env}, home=home)
    try:
        return await aws.key_id()
    except ProviderError as e:
        return str(e).split(": ")[2]
    finally:
        aws.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(FILE)
    (tmp_path / ".aws/config").write_text(CONFIG)
    return tmp_path


async def test_both_halves_use_the_credentials_that_botocore_chooses(home: Path) -> None:
    server = home / "server"
    for name, content in sky_files("aws", {}, home).items():
        (server / name).parent.mkdir(parents=True, exist_ok=True)
        (server / name).write_bytes(content)
    given = [env for env, _ in CASES.values()]
    chosen = by_botocore(home, given)
    listing = [await native(env, home) for env in given]
    creating = by_botocore(server, [sky_env(["aws"], env, home) for env in given])
    assert listing == creating
    chosen = [ALPHA if key == "ProfileNotFound" else key for key in chosen]  # botocore refuses an empty name
    assert dict(zip(CASES, listing, strict=True)) == dict(zip(CASES, chosen, strict=True))
    assert [chosen[0], chosen[6], chosen[-1]] == [KEYS["AWS_ACCESS_KEY_ID"], BETA, DEFAULT]


@pytest.mark.parametrize("case", CASES)
def test_the_named_source_is_the_one_in_use(home: Path, case: str) -> None:
    env, source = CASES[case]
    assert aws_source(env, home) == source


def test_identity_has_one_choice_of_credentials() -> None:
    env = {**KEYS, "AWS_PROFILE": "alpha", "AWS_DEFAULT_PROFILE": "beta", "AWS_REGION": "x", "HOME": "y"}
    assert aws_environment(env) == {**KEYS, "AWS_REGION": "x"}
    assert aws_environment({"AWS_PROFILE": "alpha", "AWS_DEFAULT_PROFILE": "beta"}) == {"AWS_PROFILE": "beta"}
