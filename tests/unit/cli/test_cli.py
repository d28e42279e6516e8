from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from pdserve.cli import main
from pdserve.flags import configured
from runtime.config import Config
from tests.cluster_tools import run_pdserve


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Result:
    """Run a small command that has all the flags and prints the configuration it was given."""

    @click.command()
    @configured
    def show(config: Config) -> None:
        click.echo(config.model_dump_json())

    main.add_command(show, "show-for-tests")
    try:
        return CliRunner().invoke(main, ["show-for-tests", *arguments], env=env)
    finally:
        del main.commands["show-for-tests"]


def test_every_configuration_key_is_a_flag_of_every_command() -> None:
    for name in ("demo", "up", "down", "status", "chat", "router", "worker"):
        flags = {flag for param in main.commands[name].params for flag in param.opts}
        assert {f"--{key.replace('_', '-')}" for key in Config.model_fields} <= flags, name
        assert "--config" in flags


def test_help_explains_every_flag_of_up_and_shows_to_a_client_what_it_needs() -> None:
    up = CliRunner().invoke(main, ["up", "--help"]).output
    chat = CliRunner().invoke(main, ["chat", "--help"]).output
    assert [key for key, info in Config.model_fields.items() if not info.description] == []
    assert "--kv-pool-bytes" in up
    assert "One worker:" in up
    assert "--kv-pool-bytes" not in chat
    assert chat.index("--router") < chat.index("--tls-cert")
    assert CliRunner().invoke(main, ["chat", "--max-batch=0"]).exit_code == 2  # accepted unlisted, and looked at


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "pdserve.yaml"
    file.write_text("model: from-file\nmax_batch: 7\nkv_pool_tokens: 99\n")
    env = {"PDSERVE_MODEL": "from-env", "PDSERVE_MAX_BATCH": "8"}
    done = invoke(f"--config={file}", "--model=from-flag", "--compile", env=env)
    assert done.exit_code == 0, done.output
    got = json.loads(done.output)
    assert (got["model"], got["max_batch"], got["kv_pool_tokens"], got["compile"]) == ("from-flag", 8, 99, True)
    assert got["chunk_tokens"] == Config.model_fields["chunk_tokens"].default


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--chunk-tokens=300"], "chunk_tokens"),
        (["--max-batch=0"], "max_batch"),
        (["--tls-cert=x.pem"], "tls_cert"),
        (["--lease-s=1", "--lease-margin-s=2"], "lease_margin_s"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_key_and_status_two(arguments: list[str], key: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert key in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_unknown_key_in_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pdserve.yaml"
    file.write_text("modle: x\n")
    done = invoke(f"--config={file}")
    assert done.exit_code == 2
    assert "modle" in done.stderr


def test_the_module_is_the_command_and_says_its_version() -> None:
    done = run_pdserve("--version")
    assert done.returncode == 0
    assert "0.1.0" in done.stdout


@pytest.mark.parametrize("command", ["down", "status", "chat"])
def test_without_a_cluster_the_commands_say_so(command: str, tmp_path: Path) -> None:
    done = run_pdserve(command, f"--state-dir={tmp_path}")
    assert done.returncode == 2
    assert "no cluster was started here" in done.stderr


@pytest.mark.parametrize("command", ["up", "router"])
def test_a_router_does_not_keep_its_registry_in_another_one(command: str, tmp_path: Path) -> None:
    done = run_pdserve(command, "--registry=127.0.0.1:9000", f"--state-dir={tmp_path}", "--model=oracle")
    assert done.returncode == 2
    assert "registry" in done.stderr
    assert "redis://" in done.stderr


def test_a_router_that_does_not_answer_is_named() -> None:
    status = run_pdserve("status", "--router=127.0.0.1:1")
    assert status.returncode == 1
    assert "no router answers at 127.0.0.1:1" in status.stderr


def test_help_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from pdserve.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "assert not {'torch', 'ray', 'nixl_cu12', 'triton', 'transformers'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
