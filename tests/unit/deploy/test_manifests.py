"""The manifests cannot be applied here, but every command line in them must be one that its program takes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from ray.scripts.scripts import start as ray_start

from pdserve.cli import main
from runtime.config import Config

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def parse(words: list[str]) -> Config:
    """The configuration a command line of pdserve means. Raises click's or our own error for one it does not take."""
    command = main.commands[words[0]]
    given = command.make_context(words[0], [word.replace("$(IP)", "10.0.0.9") for word in words[1:]]).params
    return Config.load({key: value for key, value in given.items() if key in Config.model_fields})


def kubernetes() -> Iterator[dict[str, object]]:
    yield from yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())


def commands() -> Iterator[tuple[str, list[str]]]:
    for document in kubernetes():
        if document["kind"] == "Deployment":
            pod = document["spec"]["template"]["spec"]  # type: ignore[index]
            for container in pod["containers"]:
                if container["image"].startswith("pdserve"):
                    yield document["metadata"]["name"], container["args"]  # type: ignore[index]


def test_each_part_of_the_kubernetes_manifest_is_started_with_flags_that_exist() -> None:
    found = {name: parse(words) for name, words in commands()}
    assert set(found) == {"pdserve-router", "pdserve-prefill", "pdserve-decode"}
    assert {one.registry for one in found.values()} == {"redis://pdserve-redis:6379/0"}
    assert found["pdserve-prefill"].role == "prefill"
    assert found["pdserve-decode"].role == "decode"
    assert found["pdserve-router"].http_listen == "10.0.0.9:8000"


def test_a_command_line_with_an_unknown_flag_would_be_noticed() -> None:
    with pytest.raises(click.NoSuchOption):
        parse(["router", "--no-such-flag"])


@pytest.mark.parametrize("name", ["Dockerfile.router", "Dockerfile.worker"])
def test_a_container_file_has_a_base_of_your_choice_and_a_command_that_exists(name: str) -> None:
    text = (DEPLOY / name).read_text()
    lines = dict(line.split(" ", 1) for line in text.splitlines() if re.match(r"(ARG|FROM|ENTRYPOINT|CMD) ", line))
    assert lines["FROM"] == "${BASE_IMAGE}"
    assert json.loads(lines["ENTRYPOINT"]) == ["pdserve"]
    words = json.loads(lines["CMD"])
    if "--help" not in words:
        parse(words)
    assert "\nUSER pdserve" in text


def test_the_ray_cluster_file_never_stops_foreign_rays_and_uses_flags_that_exist() -> None:
    text = (DEPLOY / "cluster.yaml").read_text()
    config = yaml.safe_load(text)
    lines = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    assert len(lines) == 2
    for line in lines:
        assert "ray stop" not in line
        words = shlex.split(line)
        assert "RAY_AUTH_MODE=token" in words
        ray_start.make_context("start", words[words.index("start") + 1 :])


def every_file() -> list[Path]:
    return sorted([*DEPLOY.glob("*.yaml"), *DEPLOY.glob("Dockerfile.*")])


@pytest.mark.parametrize("path", every_file(), ids=lambda path: path.name)
def test_every_variable_of_ours_is_a_configuration_key(path: Path) -> None:
    for name in re.findall(r"PDSERVE_[A-Z_]+", path.read_text()):
        assert name.removeprefix("PDSERVE_").lower() in Config.model_fields, name


@pytest.mark.parametrize("path", every_file(), ids=lambda path: path.name)
def test_a_command_in_a_comment_is_one_that_can_be_given(path: Path) -> None:
    commands = "up|down|restart|controller|router|worker"
    for line in re.findall(rf"^#.*?\bpdserve ((?:{commands}) .*)$", path.read_text(), re.M):
        command, *words = shlex.split(line.replace("HEAD", "10.0.0.1"))
        main.commands[command].make_context(command, words)


def test_every_port_that_is_probed_or_exposed_is_one_that_is_listened_on() -> None:
    for document in kubernetes():
        if document["kind"] != "Deployment":
            continue
        for container in document["spec"]["template"]["spec"]["containers"]:  # type: ignore[index]
            if not container["image"].startswith("pdserve"):
                continue
            listened = {int(port) for port in re.findall(r":(\d+)(?=\s|$)", " ".join(container["args"]))}
            probes = [container[probe] for probe in ("livenessProbe", "readinessProbe") if probe in container]
            asked = {probe.get("httpGet", probe.get("grpc"))["port"] for probe in probes}
            assert asked | {one["containerPort"] for one in container["ports"]} <= listened


def test_a_pod_is_given_the_time_its_drain_may_take() -> None:
    pods = [d["spec"]["template"]["spec"] for d in kubernetes() if d["kind"] == "Deployment"]  # type: ignore[index]
    grace = [pod["terminationGracePeriodSeconds"] for pod in pods if "terminationGracePeriodSeconds" in pod]
    assert len(grace) == 3
    assert min(grace) > Config().drain_timeout_s
    routers = [one for pod in pods for one in pod["containers"] if one["name"] == "router"]
    (pause,) = [int(one["lifecycle"]["preStop"]["exec"]["command"][1]) for one in routers]
    assert min(grace) > Config().drain_timeout_s + pause


def test_the_container_of_a_worker_has_the_weights_and_the_python_that_the_makefile_and_the_project_name() -> None:
    worker = (DEPLOY / "Dockerfile.worker").read_text()
    makefile = (DEPLOY.parent / "Makefile").read_text()
    weights = re.search(r"^WEIGHTS := (\S+)$", makefile, re.M)
    assert weights is not None
    assert weights[1] in worker
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    for name in ("Dockerfile.router", "Dockerfile.worker"):
        version = re.search(r"BASE_IMAGE=python:(3\.\d+)", (DEPLOY / name).read_text())
        assert version is not None
        assert f'requires-python = ">={version[1]}' in project
