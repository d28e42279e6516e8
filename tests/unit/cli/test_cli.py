from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from pdserve import up
from pdserve.cli import main
from pdserve.flags import configured
from runtime.config import Config
from runtime.config_keys import FIRST, SECTIONS, Process, keys_of, keys_of_up
from tests.cluster_tools import ROOT, run_pdserve


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Result:
    """Run a small command that has all the flags and prints the configuration it was given."""

    @click.command()
    @configured(keys_of_up())
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


def listed(command: str) -> list[str]:
    """The configuration keys of a command's help, in its order."""
    text = CliRunner().invoke(main, [command, "--help"]).output
    flags = re.findall(r"^  --([a-z0-9-]+)", text, re.MULTILINE)
    return [key for flag in flags if (key := flag.replace("-", "_")) in Config.model_fields]


OWN_SOURCES: dict[Process, tuple[str, ...]] = {
    "router": ("router/**/*.py",),
    "worker": (
        "engine/**/*.py", "kvtransfer/*.py", "prefill_worker/*.py", "decode_worker/*.py", "pdserve/_worker*.py",
        "pdserve/worker.py", "pdserve/sim.py",
    ),
    "controller": ("deploy/controller.py", "deploy/elastic*.py", "deploy/pressure.py", "deploy/fleet.py"),
}  # fmt: skip
NAMED_OTHERWISE = {"tls_key", "tls_ca"}  # getattr, in runtime/rpc.py


def reads(*patterns: str) -> set[str]:
    """Keys that are attributes of something called config in these files."""
    files = [file for pattern in patterns for file in ROOT.glob(pattern)]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    found = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr in Config.model_fields]
    return {node.attr for node in found if "config" in ast.unparse(node.value).rpartition(".")[2]}


@pytest.mark.parametrize("process", ["router", "worker", "controller"])
def test_the_help_of_a_process_lists_the_keys_that_its_sources_read(process: Process) -> None:
    shared = reads("runtime/**/*.py") | NAMED_OTHERWISE  # by whichever process uses that module
    assert set(listed(process)) == keys_of(process)
    assert keys_of(process) - shared == reads(*OWN_SOURCES[process]) - shared


def test_a_long_help_is_in_sections_with_the_common_keys_first_and_a_default_for_each() -> None:
    for command in ("up", "router", "worker", "controller"):
        text = CliRunner().invoke(main, [command, "--help"]).output
        keys = listed(command)
        common = [key for key in FIRST if key in keys]
        assert keys[: len(common)] == common
        assert len(keys) == len(set(keys)), "each once"
        titles = re.findall(r"^([A-Z].*):$", text, re.MULTILINE)
        assert titles[:2] == ["Options", "Common"]
        assert set(titles[2:]) <= {title for title, _ in SECTIONS.values()}
        for entry in re.split(r"^(?=  --|[A-Z])", text, flags=re.MULTILINE):
            if entry.startswith("  --") and re.match(r"  --([a-z0-9-]+)", entry)[1].replace("-", "_") in keys:  # type: ignore[index]
                assert "empty" in entry or re.search(r"\[[^\]]+\]\s*$", entry), entry
    together = set(listed("up")).union(*(listed(process) for process in OWN_SOURCES))
    assert together == set(Config.model_fields), "nothing is nowhere"


def test_every_key_is_explained_and_a_client_is_shown_what_it_needs() -> None:
    assert [key for key, info in Config.model_fields.items() if not info.description] == []
    assert listed("chat") == ["tls_cert", "tls_key", "tls_ca", "state_dir"]
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


def test_up_says_on_the_terminal_what_strangers_may_do_and_nothing_where_there_are_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    up._warn(Config())
    assert capsys.readouterr() == ("", "")
    up._warn(Config(http_listen="0.0.0.0:80", grpc_listen="0.0.0.0:81", registry_token="made up", listen="node:0"))
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "", "it is not part of what is announced"
    assert all(line.startswith("warning: ") for line in lines)
    assert sum("set api_keys_file" in line for line in lines) == 2
    assert sum("set tls_cert" in line for line in lines) == 2
