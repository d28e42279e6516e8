"""The router's process: what it needs, how it starts and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROUTER = """
import sys

BLOCKED = ("torch", "triton", "nixl", "nixl_cu12", "nixl_cu13", "ray", "transformers")


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is not installed here")


sys.meta_path.insert(0, Block())
import asyncio

from router import app
from runtime.config import Config


async def main():
    stopping = asyncio.Event()
    with app.lifecycle.signals() as stopping:
        config = Config(model="oracle", http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", drain_timeout_s=5)
        app.logs.setup(config, role="router")
        router = await app.Router.start(config)
        print(router.http, flush=True)
        await stopping.wait()
        await router.drain()
        await router.close()
    assert not [name for name in sys.modules if name.partition(".")[0] in BLOCKED]


asyncio.run(main())
print("ended", flush=True)
"""


def test_it_starts_and_ends_without_torch_triton_nixl_or_ray() -> None:
    """Public report T077 (ai-dynamo/dynamo#661)."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([sys.executable, "-c", ROUTER], stdout=subprocess.PIPE, env=env, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(f"http://{address}/health/live", timeout=5) as answer:
            assert answer.status == 200

        process.send_signal(signal.SIGTERM)

        assert process.stdout.readline().strip() == "ended"
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        ("--http-listen", "nowhere", "http_listen"),
        ("--model", "no/such/model", "model"),
        ("--api-keys-file", "no/such/file", "api_keys_file"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(flag: str, value: str, complaint: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pdserve",
        "router",
        "--model",
        "oracle",
        "--http-listen",
        "127.0.0.1:0",
        flag,
        value,
    ]

    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode != 0
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
