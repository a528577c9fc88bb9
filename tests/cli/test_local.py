"""Commands that work without a daemon, and the messages if there is none."""

import json
import os
import stat
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import jsonschema_rs
import pytest
from typer.testing import CliRunner

from broker.api.schemas.quotes import QuoteSpec
from broker.cli.core.exit_codes import CliError, Exit
from broker.cli.main import app
from broker.cli.spec import code_archive as pack
from broker.cli.spec import template
from broker.client.async_client import AsyncClient
from broker.client.transport import connection
from broker.client.transport.atomic_file import placed
from broker.client.transport.connection import Connection
from broker.client.transport.errors import Misconfigured, NotSaved
from broker.daemon.home_dir import make_home
from providers.local import kernel_calls
from trainer.contract import yaml_document as yamlfile

COMMAND = (sys.executable, "-c", "from broker.cli import main; main()")


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("kind", ["train", "script"])
@pytest.mark.parametrize("is_full", [False, True])
def test_init_writes_a_spec_that_validates(own_home: Path, kind: str, is_full: bool) -> None:
    path = own_home / "job.yaml"
    options = [*(["--script"] if kind == "script" else []), *(["--full"] if is_full else [])]
    assert run("init", str(path), *options)[0] == 0
    text = path.read_text()
    spec = QuoteSpec.model_validate(yamlfile.parse(text, "job.yaml").data)
    assert (spec.train is None) == (kind == "script")
    assert ("# The job never spends more than this. Must be a number above 0 to 1000000." in text) == is_full
    assert is_full or len(text.splitlines()) <= 15
    editor, _, schema = text.splitlines()[0].partition("$schema=file://")
    assert editor == "# yaml-language-server: "
    jsonschema_rs.validate(json.loads(Path(schema).read_text()), {"cap_usd": 1} | yamlfile.parse(text, "job.yaml").data)
    assert run("init", str(path))[0] == Exit.BAD_INPUT
    assert path.read_text() == text


def test_init_needs_no_folder_for_the_schema(own_home: Path) -> None:
    (own_home / "config").write_text("a file")
    assert run("init", str(own_home / "job.yaml"))[0] == 0
    assert (own_home / "job.yaml").read_text() == run("init", "-")[1]


def test_schema_prints_the_published_schema(own_home: Path) -> None:
    assert run("schema")[:2] == (0, (Path(__file__).parents[2] / "docs/reference/spec.schema.json").read_text())


def test_every_setting_of_init_validates_when_it_is_switched_on() -> None:
    lines = template.full_spec("train").splitlines()
    on = [line.replace("# ", "", 1) if _is_setting(line) else line for line in lines]
    data = yamlfile.parse("\n".join(on), "job.yaml").data
    data["init_from"] = None
    data["secrets"] = ["HF_TOKEN", "WANDB_API_KEY"]  # for train.output.push and train.metrics.wandb
    assert QuoteSpec.model_validate(data).checkpoint.keep == 2


def _is_setting(line: str) -> bool:
    word = line.strip().removeprefix("# ").partition(":")[0]
    return line.strip().startswith("# ") and word.isidentifier() and ":" in line and not line.strip().endswith(".")


def test_without_a_daemon_exit_4_says_what_to_do(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run("ls")
    assert code == Exit.UNREACHABLE
    assert "gpubroker serve" in err
    monkeypatch.setenv("GPUBROKER_URL", "http://127.0.0.1:9")
    code, out, err = run("ls", "--json")
    assert code == Exit.UNREACHABLE
    assert "no daemon answers at http://127.0.0.1:9" in err
    assert json.loads(out)["error"]["exit"] == 4


def test_the_daemon_is_found_in_order(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connection.find() is None
    connection.write(connection.login_file(), Connection(url="http://login", token="a"))
    connection.write(connection.local_file(), Connection(url="http://local", token="b"))
    for file in (connection.login_file(), connection.local_file()):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    address = connection.find()
    assert address is not None
    assert (address.url, address.token) == ("http://local", "b")  # GPUBROKER_HOME is set
    monkeypatch.setenv("GPUBROKER_TOKEN", "c")
    monkeypatch.setenv("GPUBROKER_URL", "http://env/")
    address = connection.find()
    assert address is not None
    assert (address.url, address.token) == ("http://env", "c")
    assert "token" not in repr(address)


def test_login_wants_an_address_and_a_token(own_home: Path) -> None:
    assert run("login", "broker.example.com", "--token", "x")[0] == Exit.BAD_INPUT
    assert run("login", "http://127.0.0.1:9")[0] == Exit.BAD_INPUT
    assert run("login", "http://127.0.0.1:9", "--token", "x")[0] == Exit.UNREACHABLE
    assert not connection.login_file().exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GPUBROKER_URL", "127.0.0.1:7170", "GPUBROKER_URL: '127.0.0.1:7170' is not an address; write http://host"),
        ("GPUBROKER_URL", "http://host:99999", "GPUBROKER_URL: 'http://host:99999' is not an address; write http"),
        ("GPUBROKER_URL", "https://", "GPUBROKER_URL: 'https://' is not an address; write http"),
        ("GPUBROKER_TOKEN", "one\nand another", "GPUBROKER_TOKEN: the token has a line break"),
    ],
)
def test_a_wrong_address_or_token_is_one_line(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv("GPUBROKER_URL", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    code, out, err = run("ls", "--json")
    assert code == Exit.BAD_INPUT
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert json.loads(out)["error"]["kind"] == "bad_input"
    assert message in run("doctor")[1]


def test_a_wrong_address_is_reported_to_programs_as_well() -> None:
    with pytest.raises(Misconfigured, match="'localhost:7070' is not an address"):
        AsyncClient("localhost:7070")


@pytest.mark.parametrize(
    ("of", "fix"), [("login_file", "run `gpubroker login URL` again"), ("local_file", "start the daemon again")]
)
@pytest.mark.parametrize("text", ["{", "[]", '{"url": "nowhere"}', "\x00", None])
def test_a_damaged_file_is_named_and_no_other_daemon_is_asked(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, of: str, fix: str, text: str | None
) -> None:
    if of == "login_file":
        monkeypatch.setenv("HOME", str(own_home))
        monkeypatch.delenv("GPUBROKER_HOME")
    else:
        connection.write(connection.login_file(), Connection(url="http://127.0.0.1:9", token="a"))
    path: Path = getattr(connection, of)()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if text is None else path.write_text(text)
    code, out, err = run("ls", "--json")
    assert code == Exit.BAD_INPUT
    assert str(path) in err
    assert fix in err
    assert err.count("\n") == 1
    assert json.loads(out)["error"]["exit"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ls", "--limit", "0", "--json"), "'--limit'"),
        (("ls", "--state", "foo", "--json"), "'foo' is not one of 'awaiting_approval', "),
        (("get", "--json"), "Missing argument 'JOB'"),
        (("ls", "--json", "--bogus"), "No such option: --bogus"),
        (("frobnicate", "--json"), "No such command 'frobnicate'"),
        (("--bogus", "--json"), "No such option: --bogus"),
    ],
)
def test_wrong_usage_is_a_document_too(own_home: Path, words: tuple[str, ...], message: str) -> None:
    code, out, err = run(*words)
    assert code == Exit.BAD_INPUT
    error = json.loads(out)["error"]
    assert (error["kind"], error["exit"]) == ("bad_input", 2)
    assert message in error["message"]
    assert "Usage: " in err
    assert "Value error" not in out + err


def test_wrong_usage_without_json_leaves_stdout_alone(own_home: Path) -> None:
    assert run("ls", "--bogus")[:2] == (Exit.BAD_INPUT, "")
    code, out, err = run("exec", "last", "ls", "-la", "--", "--json")  # which is the program's
    assert (code, out) == (Exit.BAD_INPUT, "")
    assert "gpubroker exec JOB -- PROGRAM" in " ".join(err.replace("│", "").split())


def test_serve_explains_its_configuration(own_home: Path) -> None:
    config = own_home / "gpubroker.yaml"
    config.write_text(f"providers: {{runpod: {{}}, sky: {{python: {own_home / 'no'}}}}}\n")
    code, _, err = run("serve", "--config", str(config))
    assert code == Exit.BAD_INPUT
    assert "run `gpubroker clouds install`, or remove the section" in err
    config.write_text("prot: 80\n")
    code, _, err = run("serve", "--config", str(config))
    assert code == Exit.BAD_INPUT
    assert "prot: " in err
    assert str(config) in err
    assert run("serve", "--config", str(own_home / "no.yaml"))[0] == Exit.BAD_INPUT
    (own_home / "occupied").touch()
    code, _, err = run("serve", "--home", str(own_home / "occupied" / "home"))
    assert code == Exit.BAD_INPUT
    assert "Not a directory" in err
    config.write_text("database_url: postgresql://127.0.0.1:1/absent\n")
    code, _, err = run("serve", "--config", str(config))
    assert code == Exit.SERVER_PROBLEM
    assert "cannot connect to the database: [Errno 111]" in err


def test_files_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(NotSaved, match=r"taken/adapter/a\.json"), placed(tmp_path / "taken" / "adapter" / "a.json"):
        pass


def test_blobs_init_needs_no_daemon(own_home: Path) -> None:
    code, out, _ = run("blobs", "init", (own_home / "blobs").as_uri(), "--json")
    document = json.loads(out)
    assert code == 0
    assert document["ok"]
    assert {"conditional put", "list after put"} <= {c["name"] for c in document["checks"]}
    assert run("blobs", "init", "ftp://nowhere")[0] == Exit.BAD_INPUT
    assert run("blobs", "init", "memory://", "--option", "x")[0] == Exit.BAD_INPUT


BEFORE = [("doctor",), ("blobs", "init", "{home}/blobs"), ("sweep", "--once", "--installation", "abcd")]


@pytest.mark.parametrize("words", BEFORE)
def test_commands_before_the_first_start_do_not_block_the_daemon(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Commands before the first start do not block the daemon's first start."""
    home = own_home / "state" / "home"
    monkeypatch.setenv("GPUBROKER_HOME", str(home))
    before = os.umask(0o022)  # as on most systems
    try:
        run(*(word.format(home=home.as_uri()) for word in words))
        make_home(home)
    finally:
        os.umask(before)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_doctor_makes_nothing(own_home: Path) -> None:
    _, out, _ = run("doctor", "--json")
    (store,) = (check for check in json.loads(out)["checks"] if check["name"] == "blob store")
    assert (store["ok"], "`gpubroker serve` creates it" in store["detail"]) == (True, True)
    assert list(own_home.iterdir()) == []


@pytest.mark.parametrize(("version", "words"), [(7, "in "), (0, "Landlock is too old or off")])
def test_doctor_reports_the_isolation_of_jobs_on_this_host(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, version: int, words: str
) -> None:
    monkeypatch.setattr(kernel_calls, "landlock_version", lambda: version)
    _, out, _ = run("doctor", "--json")
    (check,) = (check for check in json.loads(out)["checks"] if check["name"] == "host jobs")
    assert check["ok"]
    assert words in check["detail"]
    assert ("unshare" in check["detail"] or "a sandbox cannot start" in check["detail"]) == bool(version)


@pytest.mark.skipif(os.geteuid() != 0, reason="only a daemon that is root runs jobs as another user")
def test_doctor_names_a_model_file_that_isolated_jobs_cannot_read(own_home: Path) -> None:
    weights = own_home / "models" / "tiny" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    for folder in (weights.parent, weights.parent.parent):
        folder.chmod(0o755)
    weights.write_bytes(b"")
    weights.chmod(0o600)
    (own_home / "home").mkdir(mode=0o700)
    (own_home / "home" / "gpubroker.yaml").write_text(f"model_roots: [{own_home / 'models'}]\n")
    checks = {}
    for mode in (0o600, 0o644):
        weights.chmod(mode)
        _, out, _ = run("doctor", "--json")
        checks[mode] = next(check for check in json.loads(out)["checks"] if check["name"] == "host jobs")
    if "cannot be isolated" in checks[0o644]["detail"]:
        pytest.skip("this host cannot isolate jobs")
    assert (checks[0o600]["ok"], checks[0o644]["ok"]) == (False, True)
    assert str(weights) in checks[0o600]["detail"]
    assert checks[0o600]["fix"] == f"chmod -R o+rX {weights.parent}"


def test_blobs_init_leaves_a_folder_of_others_open(own_home: Path) -> None:
    folder = own_home / "shared"
    folder.mkdir()
    folder.chmod(0o755)
    assert run("blobs", "init", folder.as_uri())[0] == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_packed_folder_depends_on_its_contents_only(tmp_path: Path) -> None:
    archives = []
    for name, when in (("one", 1), ("two", 2_000_000_000)):
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "x.pyc").write_text(name)
        for file in ("b.py", "a.py", "sub/c.sh"):
            (folder / file).write_text(f"print({file!r})")
            os.utime(folder / file, (when, when))
        (folder / "sub/c.sh").chmod(0o750)
        archives.append(BytesIO())
        pack.pack(folder, archives[-1])
    assert archives[0].getvalue() == archives[1].getvalue()
    archives[0].seek(0)
    with tarfile.open(fileobj=archives[0]) as tar:
        assert tar.getnames() == ["a.py", "b.py", "sub/c.sh"]
        assert [m.mode for m in tar.getmembers()] == [0o644, 0o644, 0o755]


@pytest.mark.parametrize("target", ["../../etc", "/etc/hostname"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(CliError, match="links out of the folder"):
        pack.pack(tmp_path, BytesIO())


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), ("1e-4", 1e-4), ("on", "on"), ("no", "no"), ("true", True), ("'1'", "1"), ("2026-01-31", "2026-01-31")],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert yamlfile.parse_value(text) == value
    assert yamlfile.parse(f"on: {text}", "x").data == {"on": value}


@pytest.mark.parametrize("words", [("models",), ("models", "--json"), ("init", "-"), ("--help",)])
def test_a_reader_that_has_gone_is_no_failure_and_a_full_disk_is_one(own_home: Path, words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe, open("/dev/full", "wb") as full:
        completed = subprocess.run([*COMMAND, *words], stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
        left = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (completed.returncode, left.returncode) == (Exit.OK, Exit.UNWRITTEN)
    assert "error: stdout: No space left on device" in left.stderr
    for text in (completed.stderr, left.stderr):
        assert "Traceback" not in text
        assert "Exception ignored" not in text


def test_ctrl_c_while_modules_are_loaded_is_130() -> None:
    program = """
import sys
from broker.cli import main
class Pressed:
    def find_spec(self, name, *_):
        raise KeyboardInterrupt
sys.meta_path.insert(0, Pressed())
main()
"""
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (left.returncode, left.stderr) == (Exit.INTERRUPTED, "")


def test_login_sends_no_token_unencrypted_to_another_host(own_home: Path) -> None:
    for url in (
        "http://broker.example.com",
        "http://10.0.0.4:7070",
        "http://127.0.0.1.example.com",
        "http://[2001:db8::1]",
    ):
        assert run("login", url, "--token", "x")[0] == Exit.BAD_INPUT
    for url in ("http://localhost:9", "http://127.0.0.1:9", "http://[::1]:9"):
        assert run("login", url, "--token", "x")[0] == Exit.UNREACHABLE
    assert run("login", "http://0.0.0.0:9", "--token", "x", "--plain-http")[0] == Exit.UNREACHABLE


def test_help_of_every_command() -> None:
    shown = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    for name in (
        "serve",
        "login",
        "init",
        "quote",
        "submit",
        "ls",
        "get",
        "watch",
        "logs",
        "events",
        "cancel",
        "retry",
    ):
        assert name in shown
        assert run(name, "--help")[0] == 0
    for words in (("artifacts",), ("doctor",), ("token", "new"), ("secret", "set"), ("blobs", "init")):
        assert words[0] in shown
        assert run(*words, "--help")[0] == 0
    assert "130: interrupted by Ctrl-C" in " ".join(shown.split())
    assert run("frobnicate")[0] == Exit.BAD_INPUT
