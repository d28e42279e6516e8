"""Rules of this repository that a reviewer should not have to remember, checked on the syntax tree of every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "runtime", "kvtransfer", "engine", "prefill_worker", "decode_worker", "router", "pdserve", "deploy", "bench",
)  # fmt: skip

BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "torch.load": "unpickles; weights are safetensors or GGUF",
    "yaml.load": "builds any object; use yaml.safe_load",
    "yaml.unsafe_load": "builds any object; use yaml.safe_load",
    "numpy.load": "may unpickle",
    "np.load": "may unpickle",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
}
BANNED_METHODS = {"deserialize_descs": "unpickles what a peer sent", "get_serialized_descs": "its other half"}

ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": ("engine/", "bench/"),  # bench: the limit a figure is compared with is measured beside it
    "triton": ("engine/",),
    "nixl": ("kvtransfer/nixl_agent.py",),
    "nixl_cu12": ("kvtransfer/nixl_agent.py",),
    "nixl_cu13": ("kvtransfer/nixl_agent.py",),
    "redis": ("runtime/registry/redis.py",),
    "ray": ("deploy/",),
    "aiohttp": ("router/", "bench/"),  # bench: as a client
    "pydantic": ("router/", "runtime/config.py"),
    "pydantic_settings": ("runtime/config.py",),
    "jinja2": ("router/",),
}
"""External modules and the only places that may import them; a folder ends with a slash."""


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func) in ("importlib.import_module", "__import__"):
            yield from ((str(leaf.value), node.lineno) for leaf in node.args[:1] if isinstance(leaf, ast.Constant))


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def offences(path: str, source: str) -> list[str]:
    """What is wrong with a file, one line each."""
    tree, found = ast.parse(source), []
    for module, line in imports(tree):
        top = module.partition(".")[0]
        if top in BANNED_MODULES:
            found.append(f"{path}:{line}: imports {module}")
        if top in ONLY_IN and not any(
            path == place or (place.endswith("/") and path.startswith(place)) for place in ONLY_IN[top]
        ):
            found.append(f"{path}:{line}: {module} belongs in {' and '.join(ONLY_IN[top])} only")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in BANNED_CALLS:
                found.append(f"{path}:{node.lineno}: {name} {BANNED_CALLS[name]}")
            if isinstance(node.func, ast.Attribute) and node.func.attr in BANNED_METHODS:
                found.append(f"{path}:{node.lineno}: {node.func.attr} {BANNED_METHODS[node.func.attr]}")
            if any(
                key.arg == "shell" and isinstance(key.value, ast.Constant) and key.value.value for key in node.keywords
            ):
                found.append(f"{path}:{node.lineno}: runs a shell")
    return found + wide_binds(path, tree)


def wide_binds(path: str, tree: ast.AST) -> list[str]:
    """Every constant that means "all interfaces". Comparing with one is how it is refused, so that is fine."""
    compared = {id(leaf) for node in ast.walk(tree) if isinstance(node, ast.Compare) for leaf in ast.walk(node)}
    return [
        f"{path}:{node.lineno}: binds to every interface"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in compared
        and node.value.startswith(("0.0.0.0", "[::]:"))
    ]


@pytest.mark.parametrize("path", [str(path.relative_to(ROOT)) for path in sources()])
def test_a_source_file_keeps_the_rules(path: str) -> None:
    assert offences(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("router/x.py", "import torch"),
        ("router/x.py", "from triton import language"),
        ("kvtransfer/puller.py", "import nixl_cu12._api"),
        ("kvtransfer/puller.py", "import importlib\nimportlib.import_module('nixl_cu13._api')"),
        ("runtime/registry/memory.py", "def f():\n    import redis.asyncio"),
        ("pdserve/x.py", "import ray"),
        ("runtime/health.py", "from aiohttp import web"),
        ("engine/x.py", "from pydantic import BaseModel"),
        ("engine/x.py", "import pickle"),
        ("engine/x.py", "import torch\ntorch.load('x')"),
        ("runtime/x.py", "import yaml\nyaml.load('x')"),
        ("kvtransfer/nixl.py", "agent.deserialize_descs(b'')"),
        ("runtime/x.py", "eval('1')"),
        ("runtime/x.py", "import subprocess\nsubprocess.run('ls', shell=True)"),
        ("router/app.py", "listen = '0.0.0.0:80'"),
    ],
)
def test_the_check_itself_finds_each_offence(path: str, source: str) -> None:
    assert offences(path, source)


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    files = [*sources(), *(ROOT / "tests").rglob("*.py")]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > 450}
    assert long == {}


def test_nothing_refers_to_a_place_outside_the_checkout() -> None:
    named = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "NOTES.md", "Makefile", "pyproject.toml")]
    words = ("/work" + "/", "/root" + "/", "/home" + "/")
    for path in [*sources(), *named]:
        text = path.read_text(encoding="utf-8")
        assert not [word for word in words if word in text], path


def test_the_layers_hold_and_no_unused_contract_hides_a_breach() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
