"""Each bad input gives exit code 2 and one line that names the place and the fix, and creates nothing."""

from asyncio import to_thread

import pytest

from broker.ports import JobFilter
from tests.cli.conftest import GOOD, WORDS, Shell


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


SPECS = {
    "unknown key": (changed("train:\n", "epoch: 3\ntrain:\n"), "job.yaml:3: epoch: unknown key"),
    "nested unknown key": (
        changed("  data:", "  epoch: 3\n  data:"),
        "job.yaml:5: train.epoch: unknown key; did you mean epochs?",
    ),
    "wrong type": (changed("  data:", "  epochs: many\n  data:"), "job.yaml:5: train.epochs: must be a valid number"),
    "out of range": (changed("cap_usd: 5", "cap_usd: -5"), "job.yaml:2: cap_usd: must be greater than 0"),
    "missing key": (changed("    path: words.csv\n", ""), "job.yaml:5: train.data.path: is missing"),
    "both kinds": (GOOD + "script: {code: ., command: [a]}\n", "give exactly one of train and script"),
    "endless number": (
        changed("  data:", f"  seed: {'9' * 5000}\n  data:"),
        "job.yaml:5: not YAML: a number of too many",
    ),
    "NUL in a path": (changed("words.csv", '"a\\0.csv"'), "job.yaml:6: train.data.path: a NUL character"),
    "no such home": (changed("words.csv", "~nobody-of-this-name/a.csv"), "job.yaml:6: train.data.path: "),
    "model's name too long": (
        changed("HuggingFaceTB/SmolLM2-135M", "/" + "a" * 900),
        "job.yaml:4: train.model: no folder",
    ),
    "list wanted": (
        "name: a\ncap_usd: 1\nscript: {code: ., command: python a.py && ls}\n",
        "job.yaml:3: script.command: must be a list such as [a, b]",
    ),
    "key twice": (GOOD + "name: again\n", "job.yaml:9: name: the key is given twice"),
    "not YAML": (GOOD + "labels: [\n", "job.yaml:10: not YAML"),
    "no mapping": ("- 1\n", "job.yaml:1: must be a mapping"),
    "empty": ("", "job.yaml:1: must be a mapping"),
    "template column": (changed("{definition}", "{meaning}"), "job.yaml:8: train.data.completion: no column 'meaning'"),
    "template syntax": (changed("{definition}", "{definition"), "job.yaml:8: train.data.completion: "),
    "unset secret": (
        GOOD + "secrets: [HF_TOKEN]\n",
        "job.yaml:9: secrets.0: HF_TOKEN is not set; run gpubroker secret set",
    ),
    "unknown provider": (
        GOOD + "resources: {providers: [simulatd]}\n",
        "unknown provider 'simulatd'; did you mean simulated?",
    ),
    "unknown model": (changed("HuggingFaceTB/SmolLM2-135M", "nobody/nothing"), "job.yaml:4: train.model: "),
    "cap too small": (changed("cap_usd: 5", "cap_usd: 0.000001"), "job.yaml:2: cap_usd: $0.0000 is too small"),
    "absent file": (changed("words.csv", "nowhere.csv"), "job.yaml:6: train.data.path: "),
    "unknown format": (changed("words.csv", "job.yaml"), "job.yaml:6: train.data.path: "),
}
DATA = {
    "empty": ("", "is empty"),
    "header only": ("word,definition\n", "no row"),
    "ragged": ("word,definition\na,b,c\n", "line 2: more cells"),
    "not UTF-8": (b"word,definition\na,\xff\n", "not UTF-8"),
}


async def nothing_created(shell: Shell) -> bool:
    return not await shell.api.service.store.jobs(JobFilter())


@pytest.mark.parametrize("name", SPECS)
async def test_bad_spec_names_line_field_and_fix(shell: Shell, name: str) -> None:
    text, expected = SPECS[name]
    ran = await to_thread(shell.run, "submit", shell.spec(text), "--yes", "--detach")
    assert ran.code == 2
    assert expected in ran.err
    assert "Traceback" not in ran.out + ran.err
    assert await nothing_created(shell)


@pytest.mark.parametrize("name", DATA)
async def test_bad_data_names_the_file(shell: Shell, name: str) -> None:
    words, expected = DATA[name]
    ran = await to_thread(shell.run, "submit", shell.spec(GOOD, words), "--yes", "--detach")
    assert ran.code == 2
    assert "job.yaml:6: train.data.path: words.csv: " in ran.err
    assert expected in ran.err
    assert await nothing_created(shell)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("words.json", "[{", "not JSON"),
        ("words.json", '{"a": 1}', "must be a list"),
        ("words.jsonl", '{"word": "a"}\n{', "line 2: not JSON"),
    ],
)
async def test_unreadable_json_names_the_fault(shell: Shell, name: str, data: str, expected: str) -> None:
    (shell.folder / name).write_text(data)
    ran = await to_thread(shell.run, "quote", shell.spec(changed("words.csv", name)))
    assert ran.code == 2
    assert expected in ran.err


async def test_bad_input_as_json_is_one_document(shell: Shell) -> None:
    text, _ = SPECS["nested unknown key"]
    ran = await to_thread(shell.run, "submit", shell.spec(text), "--json")
    assert ran.code == 2
    assert ran.document["error"]["kind"] == "bad_input"
    assert ran.document["error"]["problems"] == [
        {"field": "train.epoch", "message": "unknown key; did you mean epochs?"}
    ]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("train.epoch=2", "--set train.epoch: no such setting; did you mean 'epochs'?"),
        ("epochs=2", "did you mean 'train.epochs'?"),
        ("train.epochs.x=2", "train.epochs is a value"),
        ("train.epochs", "write PATH=VALUE"),
        ("train.epochs=many", "error: --set train.epochs: must be a valid number"),
        ("train.data={path: words.csv, prompt: 1, completion: b}", "error: --set train.data: train.data.prompt: must"),
        ("train.data.path=absent.csv", "error: --set train.data.path: "),
        ("secrets=[HF_TOKEN]", "error: --set secrets: HF_TOKEN is not set; run gpubroker secret set"),
    ],
)
async def test_a_bad_setting_names_its_path_and_creates_nothing(shell: Shell, setting: str, expected: str) -> None:
    ran = await to_thread(shell.run, "submit", shell.spec(), "--yes", "--detach", "--set", setting)
    assert ran.code == 2
    assert expected in ran.err
    assert await nothing_created(shell)


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        ("15x", "--keep-on-failure 15x: not a duration; write it as 90s, 15m, 2h"),
        ("-5m", "--keep-on-failure -5m: not a duration; write it as 90s, 15m, 2h"),
        ("", "--keep-on-failure : not a duration; write it as 90s, 15m, 2h"),
        ("25h", "error: --keep-on-failure: must be less than or equal to 86400"),
    ],
)
async def test_a_bad_time_to_keep_names_the_form(shell: Shell, duration: str, expected: str) -> None:
    ran = await to_thread(shell.run, "submit", shell.spec(), "--yes", "--detach", f"--keep-on-failure={duration}")
    assert ran.code == 2
    assert expected in ran.err
    assert await nothing_created(shell)


async def test_cap_is_needed_where_nothing_fits(shell: Shell) -> None:
    text = changed("cap_usd: 5\n", "") + "resources: {accelerators: [b200]}\n"
    ran = await to_thread(shell.run, "submit", shell.spec(text), "--yes", "--detach")
    assert ran.code == 2
    assert "no offer fits, so no cap can be proposed" in ran.err
    assert "a submitted job would wait until one does" in ran.out
    assert "have another accelerator" in ran.out
    assert await nothing_created(shell)


async def test_a_script_needs_a_cap_because_its_run_time_is_unknown(shell: Shell) -> None:
    (shell.folder / "code").mkdir()
    (shell.folder / "code" / "a.py").write_text("")
    text = "name: a\nscript: {code: ./code, command: [python, a.py]}\n"
    ran = await to_thread(shell.run, "submit", shell.spec(text), "--yes", "--detach")
    assert ran.code == 2
    assert "cap_usd: a script's run time is unknown, so no cap can be proposed; set cap_usd" in ran.err
    assert await nothing_created(shell)


@pytest.mark.parametrize("words", [("quote",), ("submit", "--yes", "--detach")])
async def test_a_job_that_no_provider_ever_serves_is_refused(shell: Shell, words: tuple[str, ...]) -> None:
    shell.api.market.lists_all = True
    text = changed("cap_usd: 5\n", "cap_usd: 5\nresources:\n  gpus: 64\n")
    ran = await to_thread(shell.run, words[0], shell.spec(text), *words[1:])
    assert (ran.code, ran.out) == (2, "")
    assert "job.yaml:4: resources.gpus: no provider that the job may use ever sells a machine with 64 GPUs; " in ran.err
    assert "would do, or gpus: auto" in ran.err
    assert await nothing_created(shell)


async def test_an_absent_spec_suggests_init(shell: Shell) -> None:
    ran = await to_thread(shell.run, "submit", str(shell.folder / "no.yaml"), "--yes")
    assert ran.code == 2
    assert "gpubroker init" in ran.err


async def test_an_unknown_file_ending_is_refused_before_the_upload(shell: Shell) -> None:
    (shell.folder / "words.txt").write_text(WORDS)
    ran = await to_thread(shell.run, "quote", shell.spec(changed("words.csv", "words.txt")))
    assert ran.code == 2
    assert "job.yaml:6: train.data.path: cannot tell the format of 'words.txt'; set data.format to csv" in ran.err
