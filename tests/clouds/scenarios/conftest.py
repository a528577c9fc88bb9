"""One scene shared by all scenarios; a host that cannot run machines skips them with the reason."""

from collections.abc import AsyncIterator

import pytest

from tests.clouds.bake import NoBake
from tests.clouds.machines import NoNamespaces
from tests.clouds.required import cannot
from tests.clouds.scenarios.scene import Scene


@pytest.fixture(scope="session")
async def scene() -> AsyncIterator[Scene]:
    """Yield a daemon, an API server and four clouds. After all scenarios, check what must hold after each of them."""
    try:
        async with Scene() as made:
            yield made
            assert made.orphans() == [], "machines still cost money"
            assert made.secrets_seen() == [], "an account key came to a machine"
            assert made.leaks == set(), "secrets in argument lists"
            assert made.clouds.violations == []
    except (NoBake, NoNamespaces) as e:
        cannot(e)
