from __future__ import annotations

import pytest

from tests.unit.services.decoding import Setup


@pytest.fixture
async def s() -> Setup:
    """A decode service; tests of another one say so with a fixture of their own."""
    return Setup()
