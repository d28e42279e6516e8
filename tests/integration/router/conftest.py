from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.router.scripted import ScriptedWorker
from tests.integration.router.sites import Site, site


@pytest.fixture
async def pair() -> AsyncIterator[Site]:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        yield made
