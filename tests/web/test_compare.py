"""Page Compare: columns of runs, differences between specs, the address to share, and other teams' jobs."""

from tests.api.harness import Running
from tests.web.seed import fill
from tests.web.test_metrics import saved
from tests.web.test_pages import trained
from tests.web.test_security import HOSTILE, submitted
from tests.web.visitor import Visitor


async def test_runs_are_compared_by_results_and_by_settings_that_differ(api: Running, ada: Visitor) -> None:
    jobs = await fill(api.service.store, None, api.service.clock.now())
    page = (await ada.get(f"/ui/compare?jobs={jobs['over']},{jobs['live']}")).text
    for shown in ("450 of 450", "310 of 450", "train.optim.lr", "0.0003", "labels.sweep", "$0.7762", "so far"):
        assert shown in page, shown
    assert "train.optim.name" not in page
    assert page.count("data-run=") == 2
    assert f'href="/ui/compare?jobs={jobs["live"]}"' in page  # without the first run


async def test_the_form_leads_to_an_address_that_can_be_shared(api: Running, ada: Visitor) -> None:
    one, two = await submitted(api), await submitted(api)
    listed = (await ada.get("/ui/jobs")).text
    assert f'name="job" value="{one}" form="compare"' in listed
    chosen = await ada.get(f"/ui/compare?job={one}&job={two}&job={one}")
    assert (chosen.status, chosen.location) == (303, f"/ui/compare?jobs={one},{two}")
    page = (await ada.get(chosen.location)).text
    assert "The specs differ in nothing but their names" in page
    assert (await ada.get("/ui/compare?job=%0d%0aSet-Cookie:x")).location == "/ui/compare?jobs=%0D%0ASet-Cookie%3Ax"


async def test_without_runs_the_page_offers_the_newest_jobs(api: Running, ada: Visitor) -> None:
    assert "nothing to compare" in (await ada.get("/ui/compare")).text
    job = await submitted(api)
    page = (await ada.get("/ui/compare")).text
    assert f'name="job" value="{job}"' in page
    assert "<details" in page
    assert " open>" in page


async def test_more_than_eight_runs_are_refused_in_one_line(api: Running, ada: Visitor) -> None:
    job = await submitted(api)
    answer = await ada.get("/ui/compare?jobs=" + ",".join([job, *(f"{'a' * 12}{c}" for c in "abcdefgh")]))
    assert answer.status == 422
    assert "jobs: 9 runs are chosen, at most 8 are compared; choose fewer" in answer.text


async def test_a_comparison_shows_no_job_of_another_team(api: Running, ada: Visitor) -> None:
    mine, theirs = await submitted(api), await submitted(api, "bob", "other")
    for other in (theirs, "a" * 13, "nonsense"):
        assert (await ada.get(f"/ui/compare?jobs={mine},{other}")).status == 404, other
    assert theirs not in (await ada.get("/ui/compare")).text


async def test_hostile_settings_are_escaped(api: Running, ada: Visitor) -> None:
    jobs = [await submitted(api), await submitted(api, labels={"note": HOSTILE})]
    page = (await ada.get("/ui/compare?jobs=" + ",".join(jobs))).text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    for hidden in ("<script>alert", "\x1b", "\u202e"):
        assert hidden not in page


async def test_a_long_setting_is_shortened(api: Running, ada: Visitor) -> None:
    data = {"path": (await api.upload(await api.token("ada")))["ref"], "completion": "{definition}"}
    model = "HuggingFaceTB/SmolLM2-135M"
    long = {"model": model, "data": {**data, "prompt": "x" * 1000}}
    jobs = [await submitted(api, train={"model": model, "data": data}), await submitted(api, train=long)]
    page = (await ada.get("/ui/compare?jobs=" + ",".join(jobs))).text
    assert "x" * 300 + "…" in page
    assert "x" * 301 not in page


async def test_the_curves_come_from_each_runs_metrics(api: Running, ada: Visitor) -> None:
    job = await trained(api)
    await saved(api, job, 10)
    page = (await ada.get(f"/ui/compare?jobs={job}")).text
    assert f'data-run="/ui/jobs/{job}/metrics.json"' in page
    assert "compare.js" in page
