from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.router.scripted import ScriptedWorker
from tests.integration.router.sites import Site, config, site


@pytest.fixture
async def pair() -> AsyncIterator[Site]:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        yield made


@pytest.fixture
async def once() -> AsyncIterator[Site]:
    """A pair; what failed is not tried again."""
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=config(retries=0)) as made:
        yield made
