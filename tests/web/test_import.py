"""The form for a new job with a data set that the daemon reads."""

from dataclasses import replace

from broker.runtime.clock import SystemClock
from tests.api.harness import SETTINGS, memory_blobs, serving
from tests.api.test_imports import hub
from tests.support.memory_store.store import MemoryStore
from tests.web.test_security import HOSTILE
from tests.web.visitor import Visitor


async def test_a_data_set_of_the_hub_fills_the_form() -> None:
    async with hub() as made:
        settings = replace(SETTINGS, hub=made.url)
        async with serving(MemoryStore(SystemClock()), memory_blobs(), settings=settings) as api, Visitor(api) as ada:
            await ada.sign_in(await api.token("ada"))
            sent = await ada.send("/ui/new/import", source=" hf://datasets/ambrose/cynic/test.csv ")
            assert (sent.status, sent.location.startswith("/ui/new?upload=upload:")) == (303, True)
            assert "columns word, definition" in (await ada.get(sent.location)).text
            for source, part in ((HOSTILE, "not an address of"), ("https://10.0.0.1/x.csv", "data_hosts"), ("", "")):
                refused = await ada.send("/ui/new/import", source=source)
                assert (refused.status, 'aria-describedby="fault-source"' in refused.text) == (422, True)
                assert part in refused.text
                assert "<script>alert" not in refused.text
            other = await ada.post("/ui/new/import", {"Sec-Fetch-Site": "cross-site"}, source="x")
            assert other.status == 403
            async with Visitor(api) as reader:
                await reader.sign_in(await api.token("eve", "read"))
                assert (await reader.send("/ui/new/import", source="x")).status == 403
