"""The GPU check, part by part, where there is a GPU. (Without pytest: python -m tests.gpu.check)"""

from __future__ import annotations

import pytest
import torch

from tests.gpu import check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", check.PARTS)
def test_a_part_passes(name: str) -> None:
    found = check.child(name, "cuda", check.PARTS[name][1])
    assert found["ok"], found
