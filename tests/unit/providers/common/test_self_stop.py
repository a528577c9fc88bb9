"""Self-termination of a rented machine that no broker ends; `run.sh`, executed here for real."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from providers.common.machine_task import task_of
from tests.unit.providers.common.test_machine_task import PUBLIC, PYTHON, Machine, boot, here, machine

__all__ = ["machine"]

KEY = "key-of-this-machine-alone"
RUNPOD = {"RUNPOD_POD_ID": "pod1", "RUNPOD_API_KEY": KEY}
VAST = {"CONTAINER_ID": "42", "CONTAINER_API_KEY": KEY}
STOP = {"GPUBROKER_SELF_STOP": "instance_key", "GPUBROKER_SELF_STOP_S": "0"}
NOSY = """#!/bin/bash
cd /var/tmp/gpubroker
cat /etc/profile.d/container_env_var.sh /etc/environment /etc/rp_environment /proc/1/environ /proc/$PPID/environ >seen
"""
"""A program of the user's that looks for the cloud's key."""


class Api(ThreadingHTTPServer):
    """A cloud on loopback; `answers`: (status, document) for each call, the last one for all further ones."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.asked: list[tuple[str, str, str | None, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = json.loads(text) if text else None
        self.server.asked.append((self.command, self.path, self.headers["Authorization"], body))
        status, answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        self.send_response(status)
        self.end_headers()
        if status != 204:
            self.wfile.write(json.dumps(answer).encode())

    do_DELETE = do_POST  # noqa: N815

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def python(machine: Machine, before: str = "") -> None:
    """Write the machine's python3, which records its arguments and never waits."""
    hasty = f"import sys, time; time.sleep = lambda s: None; {before}sys.argv.pop(0); exec(sys.stdin.read())"
    text = '#!/bin/bash\nprintf "%s " "$@" >>"$RECORD/argv"\n'
    machine.program("python3", text + f"exec {sys.executable} -I -c '{hasty}' x -\n")


@pytest.mark.parametrize("code", ["70", "137"])
def test_the_machine_shuts_down_where_that_ends_its_bill(machine: Machine, code: str) -> None:
    task = task_of(boot(PUBLIC, GPUBROKER_SELF_STOP="os_shutdown", GPUBROKER_SELF_STOP_S="0"), docker_run=True)
    machine.do(task.run, task, env={"CODE": code})
    assert machine.argv.endswith("shutdown -h now\n")


def test_a_pod_of_runpod_terminates_itself(machine: Machine, api: Api) -> None:
    python(machine)
    api.answers = [(204, {})]
    done, given = here(machine, **STOP, **RUNPOD, GPUBROKER_SELF_STOP_URL=api.url)
    assert done.returncode == 0, done.stderr
    assert api.asked == [("DELETE", "/v2/pods/pod1", f"Bearer {KEY}", None)]
    assert machine.argv == "-I - ", "nothing of the user's is imported, and no key is in an argument list"
    assert KEY not in json.dumps(given) + done.stdout + done.stderr


@pytest.mark.parametrize("status", [401, 404, 410, 500])
def test_a_pod_that_rest_v2_does_not_end_uses_graphql(machine: Machine, api: Api, status: int) -> None:
    python(machine)
    api.answers = [(status, {"detail": "no"}), (200, {"data": {"podTerminate": None}})]
    done, _ = here(machine, **STOP, **RUNPOD, GPUBROKER_SELF_STOP_URL=api.url)
    assert done.returncode == 0, done.stderr
    query = {"query": 'mutation { podTerminate(input: { podId: "pod1" }) }'}
    assert api.asked[1:] == [("POST", "/graphql", f"Bearer {KEY}", query)]


def test_an_instance_of_vast_destroys_itself(machine: Machine, api: Api) -> None:
    python(machine)
    api.answers = [(200, {"success": True})]
    done, _ = here(machine, **STOP, **VAST, GPUBROKER_SELF_STOP_URL=api.url)
    assert done.returncode == 0, done.stderr
    assert api.asked == [("DELETE", "/api/v0/instances/42/", f"Bearer {KEY}", {})]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (RUNPOD, "DELETE https://api.runpod.io/v2/pods/pod1 gpubroker"),
        (VAST, "DELETE https://console.vast.ai/api/v0/instances/42/ gpubroker"),
    ],
)
def test_the_self_stop_calls_the_machines_own_cloud(machine: Machine, given: dict[str, str], asked: str) -> None:
    show = 'print(r.get_method(), r.full_url, r.get_header("User-agent"))'
    answer = 'A(b"{\\"data\\": 0, \\"success\\": true}")'
    kind = 'A = type("A", (io.BytesIO,), {"status": 204})'
    python(machine, f"import io, urllib.request as u; {kind}; u.urlopen = lambda r, timeout: {show} or {answer}; ")
    done, _ = here(machine, **STOP, **given)
    assert done.stdout.splitlines()[-1] == asked


@pytest.mark.parametrize("file", ["profile.d/container_env_var.sh", "environment", "rp_environment"])
def test_only_root_finds_a_key_in_the_containers_files(machine: Machine, api: Api, file: str) -> None:
    python(machine)
    api.answers = [(204, {})]
    copy = machine.etc / file
    copy.write_text(f'declare -x OTHER="1"\ndeclare -x RUNPOD_API_KEY="{KEY}"\nexport RUNPOD_POD_ID=pod1\n')
    copy.chmod(0o644)
    done, _ = here(machine, PYTHON.replace("exit ", NOSY + "exit "), **STOP, GPUBROKER_SELF_STOP_URL=api.url)
    assert done.returncode == 0, done.stderr
    assert KEY not in (machine.work / "seen").read_text()
    assert [call[2] for call in api.asked] == [f"Bearer {KEY}"]


def test_the_self_stop_is_repeated_until_it_is_accepted(machine: Machine, api: Api) -> None:
    python(machine)
    api.answers = [(500, {}), (200, {"errors": [{"message": f"no {KEY}"}]}), (204, {})]
    done, _ = here(machine, **STOP, **RUNPOD, GPUBROKER_SELF_STOP_URL=api.url)
    assert len(api.asked) == 3
    assert "runpod does not end this machine: HTTPError 500\n" in done.stderr
    assert 'it answered {"errors": [{"message": "no ..."}]}' in done.stderr


def test_the_self_stop_gives_up_after_a_day_with_a_message(machine: Machine, api: Api) -> None:
    python(machine)
    api.answers = [(200, {"success": False, "error": "auth_error"})]
    done, _ = here(machine, **STOP, **VAST, GPUBROKER_SELF_STOP_URL=api.url)
    assert len(api.asked) == 144
    assert "this machine cannot end itself; destroy it by `gpubroker sweep`" in done.stderr


def test_the_self_stop_without_a_key_is_reported(machine: Machine) -> None:
    python(machine)
    done, _ = here(machine, **STOP, CONTAINER_ID="42")
    assert "the cloud has set no key on this machine" in done.stderr
    assert machine.argv == ""


def test_nothing_is_ended_where_it_would_not_end_the_bill(machine: Machine, api: Api) -> None:
    python(machine)
    done, _ = here(machine, **STOP | {"GPUBROKER_SELF_STOP": "none"}, **RUNPOD, GPUBROKER_SELF_STOP_URL=api.url)
    assert (done.returncode, api.asked, machine.argv) == (0, [], "")
