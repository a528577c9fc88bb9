"""Actions on ticked jobs, and a new job from the spec of another one."""

import asyncio
import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from broker.api.http.context import ACTIONS
from broker.domain.spec import JobSpec
from broker.web.app import PAGES
from broker.web.job_form import as_yaml, document, form_of, further_settings
from tests.api.harness import CSV, Running, disconnected
from tests.web.test_pages import trained
from tests.web.test_security import HOSTILE, submitted
from tests.web.test_team import hidden
from tests.web.visitor import Visitor

TIMEOUT_S = 60.0
SELECTED = "/ui/jobs/selected"


def ask(action: str, *jobs: str) -> str:
    return f"{SELECTED}?do={action}&back=/ui/jobs%3Fowner%3Dada" + "".join(f"&job={job}" for job in jobs)


def shown(text: str) -> dict[str, str]:
    """Return the hidden fields of the page's form."""
    return {name: hidden(text, name) for name in ("do", "back", "key", "total", "jobs")}


async def test_ticked_jobs_are_cancelled_after_the_page_says_so(api: Running, ada: Visitor) -> None:
    over = await trained(api, ended=True)
    first, second = await submitted(api), await submitted(api)
    page = await ada.get(ask("cancel", first, over))
    assert "Cancel 1 job" in page.text
    assert page.text.count("ends at once and costs nothing more") == 1
    assert "nothing to do" in page.text
    for _ in range(2):  # a form that is sent twice
        done = await ada.send(SELECTED, **shown(page.text))
        assert (done.status, done.location) == (303, "/ui/jobs?owner=ada")
    states = {job: (await ada.api.service.store.job(job)).stop_requested for job in (first, second, over)}  # type: ignore[union-attr]
    assert states == {first: True, second: False, over: False}


async def test_ticked_jobs_are_cancelled_although_the_tab_is_closed(
    api: Running, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The action stopped between two jobs, and the other jobs ran on and cost money."""
    jobs = [await submitted(api) for _ in range(3)]
    fields = shown((await ada.get(ask("cancel", *jobs))).text)
    entered, left, cancel = asyncio.Event(), disconnected(api, monkeypatch), api.service.cancel

    async def held(*given: Any) -> Any:
        entered.set()
        await left.wait()
        return await cancel(*given)

    monkeypatch.setattr(api.service, "cancel", held)
    tab = asyncio.create_task(ada.send(SELECTED, **fields))
    async with asyncio.timeout(TIMEOUT_S):
        await entered.wait()
        tab.cancel()
        await left.wait()
        await api.app[ACTIONS].close()
    assert all([(await api.service.store.job(job)).stop_requested for job in jobs])  # type: ignore[arg-type, union-attr]


def test_only_checks_before_one_write_end_with_the_tab() -> None:
    """Every other write runs to its end, so that no tab that is closed leaves half of it undone."""
    cancelled = {
        route.path for routes in PAGES for route in routes.items if route.method == "POST" and not route.runs_to_end
    }
    assert cancelled == {
        "/ui/new/upload", "/ui/new/import", "/ui/new/quote", "/ui/new/spec", "/ui/new/fields", "/ui/new/submit",
        "/ui/jobs/{job_id}/retry", "/ui/system/check", "/ui/spend/invoice",
    }  # fmt: skip


async def test_the_cap_of_ticked_jobs_is_raised_and_a_refusal_names_its_job(api: Running, ada: Visitor) -> None:
    small, large = await submitted(api, cap_usd="5"), await submitted(api, cap_usd="8")
    page = await ada.get(ask("cap", small, large))
    fields = shown(page.text)
    bad = await ada.send(SELECTED, **fields, cap_usd="much")
    assert (bad.status, "is not an amount" in bad.text, 'id="fault-cap_usd"' in bad.text) == (422, True, True)
    partly = await ada.send(SELECTED, **fields, cap_usd="7")
    assert partly.status == 409
    assert "is not above the cap of $8" in partly.text
    assert f"/ui/jobs/{small}" not in partly.text  # it was raised
    caps = [(await api.service.store.job(job)).cap_usd for job in (small, large)]  # type: ignore[union-attr]
    assert caps == [7, 8]


async def test_ticked_jobs_run_again_once_at_the_sum_that_was_shown(api: Running, ada: Visitor) -> None:
    over = await trained(api, ended=True)
    page = await ada.get(ask("retry", over))
    fields = shown(page.text)
    wrong = await ada.send(SELECTED, **(fields | {"total": "1"}))
    assert (wrong.status, "another sum of caps" in wrong.text) == (422, True)
    for _ in range(2):
        assert (await ada.send(SELECTED, **fields)).status == 303
    listed = (await ada.get("/ui/jobs")).text
    assert len(set(re.findall(r'href="/ui/jobs/([a-z2-7]{13})"', listed))) == 2


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (SELECTED, "no such action"),
        (ask("cancel"), "no job is ticked"),
        (ask("clone"), "tick the one job to clone"),
        (ask("destroy", "a" * 13), "no such action"),
        (ask("cancel", *(f"{n:013}" for n in range(101))), "101 jobs are ticked; tick at most 100"),
    ],
)
async def test_a_selection_that_means_nothing_is_refused_in_one_line(ada: Visitor, path: str, line: str) -> None:
    page = await ada.get(path)
    assert (page.status, line in page.text) == (422, True)


async def test_ticked_jobs_of_another_team_do_not_exist(api: Running, ada: Visitor) -> None:
    own, theirs = await submitted(api), await submitted(api, "bob", "other")
    for action in ("cancel", "retry", "cap", "clone"):
        jobs = (theirs,) if action == "clone" else (own, theirs)
        assert (await ada.get(ask(action, *jobs))).status == 404, action
        sent = await ada.send(SELECTED, do=action, jobs=" ".join(jobs), cap_usd="9", total="10", key="k")
        assert sent.status == (422 if action == "clone" else 404), action
    assert not (await api.service.store.job(own)).stop_requested  # type: ignore[arg-type, union-attr]
    assert (await ada.get(f"/ui/new?clone={theirs}")).status == 404


async def test_a_selection_needs_its_scope_and_this_origin(api: Running, ada: Visitor) -> None:
    job = await submitted(api)
    other = await ada.post(SELECTED, {"Sec-Fetch-Site": "cross-site"}, do="cancel", jobs=job)
    assert other.status == 403
    async with Visitor(api) as reader:
        await reader.sign_in(await api.token("eve", "read"))
        assert (await reader.get(ask("cancel", job))).status == 403
        assert (await reader.send(SELECTED, do="cancel", jobs=job)).status == 403
        assert "selected" not in (await reader.get("/ui/jobs")).text
    away = await ada.get(ask("cancel", job).replace("/ui/jobs%3Fowner%3Dada", "https://evil.example"))
    assert hidden(away.text, "back") == "/ui/jobs"


async def test_a_clone_prefills_the_form_with_data_fields_and_the_rest(api: Running, ada: Visitor) -> None:
    job = await submitted(api, labels={"note": HOSTILE}, priority=3)
    sent = await ada.get(ask("clone", job))
    assert (sent.status, sent.location) == (303, f"/ui/new?clone={job}")
    page = (await ada.get(sent.location)).text
    assert 'value="HuggingFaceTB/SmolLM2-135M"' in page
    assert "words.csv" in page
    assert "priority: 3" in page
    assert "<script>alert" not in page
    async with Visitor(api) as bob:
        await bob.sign_in(await api.token("bob"))
        page = (await bob.get(f"/ui/new?clone={job}")).text
        assert "are not among your uploads" in page
        [action] = re.findall(r'action="(/ui/new/upload[^"]*)"', page)
        refused = await bob.upload(action, "words.zip", b"PK")
        assert (refused.status, "priority: 3" in refused.text) == (422, True)
        stored = await bob.upload(action, "words.csv", CSV.encode())
        page = (await bob.get(stored.location)).text
        assert "words.csv" in page
        assert "priority: 3" in page
        assert "are not among your uploads" not in page


SPEC: dict[str, Any] = {
    "name": "words", "cap_usd": "5.00", "labels": {"a": "1"}, "priority": 3,
    "resources": {"gpus": 2, "accelerators": ["h100", "l40s"], "spot": "only", "min_memory": "40GB"},
    "train": {
        "task": "causal_lm", "model": "a/b", "epochs": 2, "method": {"name": "lora", "r": 8},
        "data": {"path": "upload:" + "a" * 64, "prompt": "Say {x}:", "completion": " {y}", "learn": "last"},
        "optim": {"lr": 0.0002, "name": "adamw"},
    },
}  # fmt: skip


def test_a_cloned_form_describes_the_same_spec() -> None:
    form, more = form_of(SPEC)
    assert form["accelerators"] == "h100, l40s"
    assert more == yaml.safe_load(
        "{labels: {a: '1'}, priority: 3, resources: {min_memory: 40GB}, "
        "train: {method: {r: 8}, data: {learn: last}, optim: {name: adamw}}}"
    )
    again = document(form, SPEC["train"]["data"]["path"], more)
    wanted = {**SPEC, "train": {**SPEC["train"], "method": {"r": 8}}}  # lora is the form's default
    assert again == wanted
    assert SPEC["train"]["optim"]["lr"] == 0.0002  # the spec that was read is unchanged


def test_a_clone_of_every_default_is_the_same_job() -> None:
    spec = JobSpec.model_validate(
        {"name": "x", "cap_usd": "5", "train": {"model": "a/b", "data": {"path": "upload:" + "a" * 64,
                                                                        "prompt": "{x}", "completion": "{y}"}}}
    )  # fmt: skip
    assert spec.train is not None
    form, more = form_of(spec.model_dump(mode="json"))
    again = JobSpec.model_validate(document(form, spec.train.data.path, more))
    assert again.model_dump() == spec.model_dump()


class FormReader(HTMLParser):
    """Fields of the form for a new job, as a browser submits them: an input of one line has no line breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self._area = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "input" and found.get("type") == "text":
            self.fields[found["name"] or ""] = re.sub(r"[\r\n]", "", found.get("value") or "")
        self._area = (found.get("name") or "") if tag == "textarea" else ""

    def handle_data(self, data: str) -> None:
        if self._area:
            self.fields[self._area] = self.fields.get(self._area, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._area = ""


@pytest.mark.parametrize("prompt", ["Q: {word}\nA:", "{word}\r\n", "\n{word}", " {word} "])
async def test_a_clone_sends_the_same_templates_as_the_job(api: Running, ada: Visitor, prompt: str) -> None:
    job = await submitted(api)
    row = await api.service.store.job(job)  # type: ignore[arg-type]
    train = row.spec.model_dump(mode="json", exclude_unset=True)["train"]  # type: ignore[union-attr]
    train["data"] |= {"prompt": prompt}
    form, more = form_of({"name": "a", "train": train})
    page = await ada.get("/ui/new?" + urlencode(form | {"more": as_yaml(more)}))
    reader = FormReader()
    reader.feed(page.text)
    again = document(reader.fields, "", further_settings(reader.fields))
    assert again["train"]["data"]["prompt"] == prompt


def test_a_label_with_spaces_at_its_ends_is_cloned_unchanged() -> None:
    data = {"prompt": "{x}", "label": " lab "}
    form, more = form_of({"train": {"task": "text_classification", "data": data}})
    assert document(form, "", more)["train"]["data"] == data
