"""The form for a new job: data, columns, the quote, and one write."""

import asyncio
import io
import re
import tarfile
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import yaml

from broker.domain.errors import InvalidInput
from broker.domain.ids import JobId
from broker.domain.spec import JobSpec
from broker.web.job_form import MORE, MORE_BYTES, cap_text, document, field_of, form_of, further_settings, suggested
from broker.web.quote_view import deadline_chance, memory_parts, quote_summary
from tests.api.harness import CSV, MODEL, Running
from tests.support.machines import offer, quoted
from tests.web.visitor import Visitor
from trainer.contract import yaml_document

NOW = datetime(2026, 1, 1, tzinfo=UTC)


async def filled(ada: Visitor, **changes: str) -> dict[str, str]:
    """Return the fields of the form after an upload."""
    answer = await ada.upload("/ui/new/upload", "words.csv", CSV.encode())
    assert answer.status == 303, answer.text
    reference = answer.location.partition("upload=")[2]
    page = await ada.get(answer.location)
    assert "40 rows; columns word, definition" in page.text
    fields = {"upload": reference, "key": "k1", "task": "causal_lm", "name": "words", "model": MODEL,
              "prompt": "Define {word}:", "completion": "{definition}", "method": "lora", "gpus": "auto"}  # fmt: skip
    return fields | changes


async def test_an_upload_suggests_the_columns_and_a_name(ada: Visitor) -> None:
    answer = await ada.upload("/ui/new/upload", "Words_2.csv", CSV.encode())
    page = (await ada.get(answer.location)).text
    assert 'value="{word}"' in page
    assert 'value=" {definition}"' in page
    assert 'value="words-2"' in page


def test_the_space_between_prompt_and_completion_is_kept() -> None:
    spec = document({"prompt": "Define {word}: ", "completion": " {definition}", "name": " words "}, "", {})
    assert (spec["train"]["data"], spec["name"]) == (
        {"prompt": "Define {word}: ", "completion": " {definition}"},
        "words",
    )


async def test_another_task_gets_columns_for_its_own_fields(ada: Visitor) -> None:
    location = (await ada.upload("/ui/new/upload", "words.csv", CSV.encode())).location
    page = (await ada.get(f"{location}&task=dpo&prompt=mine")).text
    assert 'name="prompt" type="text" value="mine"' in page
    assert 'name="rejected" type="text" value="{definition}"' in page
    assert 'name="completion"' not in page


async def test_an_unreadable_file_is_refused_next_to_the_field(ada: Visitor) -> None:
    for name, content in (("words.xyz", b"a"), ("words.csv", b"")):
        answer = await ada.upload("/ui/new/upload", name, content)
        assert answer.status == 422, name
        assert '<p class="fault" id="fault-upload" role="alert"></p>' not in answer.text, name


async def test_the_quote_is_one_sentence_then_memory_then_offers(ada: Visitor) -> None:
    answer = await ada.htmx("/ui/new/quote", **await filled(ada, cap_usd="5", deadline="2099-01-01T00:00:00Z"))
    assert answer.status == 200
    assert "About <b>$0." in answer.text
    assert "at most <b>$5</b> by" in answer.text
    assert "Chance to meet the deadline: <b>100 %</b>" in answer.text
    assert "offers fit" in answer.text
    assert "dropped: need more memory" in answer.text
    assert "Define word0:" in answer.text
    assert 'class="m-weights"' in answer.text
    assert "<html" not in answer.text
    assert "<html" in (await ada.send("/ui/new/quote", **await filled(ada))).text  # without JavaScript


async def test_every_fault_is_next_to_its_field_in_the_words_of_the_api(ada: Visitor) -> None:
    form = await filled(ada, prompt="{nope}")
    answer = await ada.htmx("/ui/new/quote", **form)
    assert 'id="fault-prompt" role="alert" hx-swap-oob="true">no column &#39;nope&#39; in the data' in answer.text
    wrong = await ada.htmx("/ui/new/quote", **form | {"gpus": "x", "cap_usd": "-3", "name": "No Name"})
    for name in ("gpus", "cap_usd", "name"):
        assert f'id="fault-{name}" role="alert" hx-swap-oob="true"></p>' not in wrong.text, name
    bad = await ada.htmx("/ui/new/quote", **form | {MORE: "a: [1"})
    assert 'id="fault-more" role="alert" hx-swap-oob="true"></p>' not in bad.text


async def test_a_form_that_is_sent_twice_is_one_job(api: Running, ada: Visitor) -> None:
    form = await filled(ada, cap_usd="5", shown_cap="5")
    answers = await asyncio.gather(*(ada.send("/ui/new/submit", **form) for _ in range(4)))
    assert {a.status for a in answers} == {303}
    (location,) = {a.location for a in answers}
    jobs = await api.call("GET", "/v1/jobs", await api.token("ada"), 200)
    assert [f"/ui/jobs/{job['id']}" for job in jobs["items"]] == [location]
    other = await ada.send("/ui/new/submit", **form | {"cap_usd": "6", "shown_cap": "6"})
    assert other.status == 409
    assert 'role="alert"' in other.text


async def test_without_a_cap_the_proposed_one_counts_and_none_is_refused(ada: Visitor) -> None:
    form = await filled(ada)
    refused = await ada.send("/ui/new/submit", **form)
    assert refused.status == 422
    page = await ada.send("/ui/new/submit", **form | {"shown_cap": "0.50"})
    assert "of $0.5000" in (await ada.get(page.location)).text


def shown_cap(page: str) -> str:
    """Return the cap that a quote's page sends with its button, which shows the same."""
    (cap,) = re.findall(r'name="shown_cap" value="([^"]*)"', page)
    assert f"Submit, at most ${cap}<" in page
    assert f"at most <b>${cap}</b> by" in page
    return str(cap)


async def caps(api: Running) -> list[str]:
    jobs = await api.call("GET", "/v1/jobs", await api.token("ada"), 200)
    return [job["cap_usd"] for job in jobs["items"]]


@pytest.mark.parametrize("field", ["", "2"])
async def test_the_cap_that_is_shown_is_the_cap_of_the_job(api: Running, ada: Visitor, field: str) -> None:
    """The further settings win over the field."""
    form = await filled(ada, cap_usd=field, more="cap_usd: 500")
    cap = shown_cap((await ada.htmx("/ui/new/quote", **form)).text)
    assert cap == "500"
    assert (await ada.send("/ui/new/submit", **form, shown_cap=cap)).status == 303
    assert await caps(api) == ["500"]


@pytest.mark.parametrize("seen", [{"shown_cap": "4"}, {}])
async def test_a_cap_that_was_not_shown_is_quoted_again_not_submitted(
    api: Running, ada: Visitor, seen: dict[str, str]
) -> None:
    form = await filled(ada, cap_usd="4000")
    answer = await ada.send("/ui/new/submit", **form | seen)
    assert answer.status == 409
    assert f"the quote showed {'$4' if seen else 'no cap'}, and the cap is $4000" in answer.text
    assert await caps(api) == []
    assert (await ada.send("/ui/new/submit", **form, shown_cap=shown_cap(answer.text))).status == 303
    assert await caps(api) == ["4000"]


async def test_enter_in_the_form_quotes(ada: Visitor) -> None:
    """The default button of a form is its first one that submits."""
    page = (await ada.send("/ui/new/quote", **await filled(ada))).text
    form = page.partition('<form class="new"')[2].partition("</form>")[0]
    first = form[form.index("<button") :].partition("</button>")[0]
    assert first.endswith(">Quote")
    assert "formaction" not in first
    assert "<noscript" not in form


@pytest.mark.parametrize(("cap", "text"), [("5.000", "5"), ("0.5", "0.50"), ("100", "100"), ("1.234567", "1.234567")])
def test_equal_caps_have_one_text(cap: str, text: str) -> None:
    assert cap_text(Decimal(cap)) == text


async def test_long_further_settings_are_refused_before_they_are_parsed(ada: Visitor) -> None:
    form = await filled(ada, cap_usd="5", shown_cap="5", more="#" * (MORE_BYTES + 1))
    for path in ("quote", "submit", "spec"):
        answer = await ada.htmx(f"/ui/new/{path}", **form)
        assert re.search(r'id="fault-more"[^>]*>has 32,769 bytes; give at most 32,768', answer.text), path


@pytest.mark.parametrize(
    "changes",
    [{"key": "a\0b"}, {"more": 'labels: {a: "\\ud800"}'}, {"more": "a: " + "[" * 400 + "]" * 400}],
    ids=["NUL", "half of a character", "nested"],
)
async def test_texts_that_no_database_takes_are_refused(ada: Visitor, changes: dict[str, str]) -> None:
    form = await filled(ada, cap_usd="5", shown_cap="5")
    assert (await ada.send("/ui/new/submit", **form | changes)).status == 422


async def test_further_settings_are_parsed_once_and_off_the_event_loop(
    ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, threads = yaml_document.parse, list[int]()

    def observed(text: str, name: str) -> yaml_document.YamlDocument:
        threads.append(threading.get_ident())
        return parse(text, name)

    monkeypatch.setattr(yaml_document, "parse", observed)
    await ada.htmx("/ui/new/quote", **await filled(ada, more="priority: 3"))
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_a_number_of_thousands_of_digits_is_a_fault_of_its_field(ada: Visitor) -> None:
    form = await filled(ada)
    for name in ("cap_usd", "epochs", "max_steps", "lr", "gpus", "deadline"):
        answer = await ada.htmx("/ui/new/quote", **form | {name: "9" * 5000})
        assert answer.status == 200, name
        assert f'id="fault-{name}" role="alert" hx-swap-oob="true"></p>' not in answer.text, name


async def test_a_job_with_the_data_of_another_user_is_refused(api: Running, ada: Visitor) -> None:
    form = await filled(ada)
    async with Visitor(api) as bob:
        await bob.sign_in(await api.token("bob", team="other"))
        answer = await bob.htmx("/ui/new/quote", **form)
    assert "no upload" in answer.text
    assert "words.csv" not in answer.text


async def test_the_downloaded_spec_is_the_form_for_the_command_line(ada: Visitor) -> None:
    form = await filled(ada, cap_usd="5", epochs="2", accelerators="l40s, h100", more="priority: 3")
    answer = await ada.send("/ui/new/spec", **form)
    spec = yaml.safe_load(answer.text)
    assert spec["train"]["data"]["path"] == "words.csv"
    made = JobSpec.model_validate(spec)
    assert made.priority == 3
    assert made.train is not None
    assert made.train.epochs == 2
    assert made.resources.accelerators == ("l40s", "h100")


async def test_the_query_prefills_the_model(ada: Visitor) -> None:
    assert 'value="a/b"' in (await ada.get("/ui/new?model=a/b")).text


async def test_a_script_is_quoted_downloaded_submitted_and_cloned(api: Running, ada: Visitor) -> None:
    page = (await ada.get("/ui/new?task=script")).text
    assert 'name="model"' not in page
    [action] = re.findall(r'action="(/ui/new/upload[^"]*)"', page)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("train.py"))
    location = (await ada.upload(action, "code.tar", packed.getvalue())).location
    assert 'name="command"' in (await ada.get(location)).text
    fields = {
        "upload": location.partition("upload=")[2].partition("&")[0], "task": "script", "name": "s", "key": "s1",
        "cap_usd": "5", "shown_cap": "5", "cpus": "2", "memory_gb": "4", "disk_gb": "20",
        "command": "python train.py --lr 1e-4", "requirements": "requirements.txt", "setup": "pip list\r\necho hi\r\n",
    }  # fmt: skip
    quoted = await ada.htmx("/ui/new/quote", **fields | {"command": "a | b", "cpus": "0"})
    assert re.search(r'id="fault-command"[^>]*>must be a list', quoted.text)
    assert re.search(r'id="fault-cpus"[^>]*>[^<]', quoted.text)
    spec = yaml.safe_load((await ada.send("/ui/new/spec", **fields)).text)
    assert spec["script"]["code"] == "code"
    assert spec["resources"] == {"cpus": 2, "memory_gb": 4, "disk_gb": 20}
    sent = await ada.send("/ui/new/submit", **fields)
    assert sent.status == 303, sent.text
    job = await api.service.store.job(JobId(sent.location.rpartition("/")[2]))
    assert job is not None
    assert job.spec.script is not None
    assert job.spec.script.command == ("python", "train.py", "--lr", "1e-4")
    assert job.spec.script.setup == ("pip list", "echo hi")
    clone = (await ada.get(f"/ui/new?clone={job.id}")).text
    for shown in ('value="python train.py --lr 1e-4"', "pip list\necho hi</textarea>", 'value="20"', "code.tar"):
        assert shown in clone, shown


@pytest.mark.parametrize(
    "script",
    [
        {"command": ["bash", "-c", "a | b; c"], "setup": ["a ", "b"]}, {"command": ["a", "b\nc", ""], "setup": []},
        {"command": ["cd", "x"], "image": "a/b:1", "setup": ["# x", "y"], "setup_timeout_s": 9},
    ],
)  # fmt: skip
def test_a_cloned_script_describes_the_same_spec(script: dict[str, Any]) -> None:
    spec = {"script": {"code": "upload:1", **script}, "resources": {"disk_gb": 9, "gpus": 2}}
    form, more = form_of(spec)
    again = document(form, "upload:1", more)
    assert again["script"] | {"setup": again["script"].get("setup", [])} == spec["script"]
    assert again["resources"] == spec["resources"]


async def test_a_whole_spec_as_yaml_fills_the_fields(ada: Visitor) -> None:
    spec = "name: other\npriority: 3\nresources: {cpus: 8}\ntrain: {model: a/b, epochs: 3, optim: {lr: 0.0002}}\n"
    form = await filled(ada, more=spec)
    page = (await ada.send("/ui/new/fields", **form)).text
    for field, value in (("name", "other"), ("model", "a/b"), ("epochs", "3"), ("lr", "0.0002"), ("cpus", "8")):
        assert f'name="{field}" type="text" value="{value}"' in page, field
    assert re.search(r'<textarea id="f-more"[^>]*>\s*priority: 3\s*</textarea>', page)
    assert f'name="upload" value="{form["upload"]}"' in page
    script = (await ada.send("/ui/new/fields", **form | {"more": "script: {command: [python, x.py]}"})).text
    assert 'name="command" type="text" value="python x.py"' in script
    assert re.search(r'<textarea id="f-more"[^>]*>\s*</textarea>', script)
    back = await ada.send("/ui/new/fields", **form | {"task": "script", "more": "train: {model: c/d}"})
    assert 'name="model" type="text" value="c/d"' in back.text
    bad = await ada.send("/ui/new/fields", **form | {"more": "a: [1"})
    assert (bad.status, "a: [1" in bad.text) == (422, True)


def test_other_settings_win_over_the_fields() -> None:
    form = {"name": "a", "epochs": "3", "lr": "1e-4", MORE: "train: {epochs: 5}\nlabels: {team: nlp}"}
    assert document(form, "", further_settings(form)) == {
        "name": "a",
        "train": {"epochs": 5, "optim": {"lr": 0.0001}},
        "labels": {"team": "nlp"},
    }
    with pytest.raises(InvalidInput, match="more"):
        further_settings({MORE: "a: 1\na: 2"})


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("train.optim.lr", "lr"), ("resources.accelerators.0", "accelerators"), ("train.data.path", "upload"),
        ("train.method.r", "method"), ("labels.x", ""), ("body", ""),
    ],
)  # fmt: skip
def test_a_place_of_the_spec_belongs_to_its_field(path: str, field: str) -> None:
    assert field_of(path) == field


@pytest.mark.parametrize(
    ("task", "columns", "mapping"),
    [
        ("causal_lm", ["id", "instruction", "output"], {"prompt": "{instruction}", "completion": " {output}"}),
        ("causal_lm", ["messages", "id"], {"messages": "messages"}),
        ("causal_lm", ["text"], {"completion": "{text}"}),
        ("text_classification", ["text", "label"], {"prompt": "{text}", "label": "label"}),
        ("dpo", ["prompt", "chosen", "rejected"],
         {"prompt": "{prompt}", "chosen": "{chosen}", "rejected": "{rejected}"}),
        ("causal_lm", [], {}),
    ],
)  # fmt: skip
def test_columns_are_suggested_by_their_names(task: str, columns: list[str], mapping: dict[str, str]) -> None:
    assert suggested(task, columns) == mapping


def test_the_chance_to_meet_a_deadline_follows_p50_and_p90() -> None:
    best = quoted([offer()]).best
    assert best is not None
    assert best.hours_p50 is not None
    assert best.hours_p90 is not None
    at = [deadline_chance(best, NOW, NOW + timedelta(hours=h)) for h in (best.hours_p50, best.hours_p90, -1)]
    assert at == [pytest.approx(0.5), pytest.approx(0.9), 0.0]


def test_memory_fits_into_its_bar_and_spot_savings_compare_the_markets() -> None:
    spot = offer(id="cloud/s", spot=True, usd_per_hour=Decimal("1.00"), preemptions_per_hour=0.01)
    summary = quote_summary(quoted([offer(), spot]), NOW, None)
    assert summary.best is not None
    assert summary.spot_saves is not None
    assert summary.spot_saves > 0
    parts = memory_parts(summary.best)
    assert parts[-1].x + parts[-1].width <= 100
    assert summary.required_percent <= 100
    assert quote_summary(quoted([offer()]), NOW, None).spot_saves is None
