"""Every flag and key that the README names beside its commands is one that exists."""

from __future__ import annotations

import re
import shlex

import pytest

from pdserve.cli import main
from runtime.config import Config
from tests import readme

PROSE = re.sub(r"^```.*?^```$", "", readme.README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def known_flags() -> set[str]:
    params = [one for command in main.commands.values() for one in command.params]
    return {flag for one in params for flag in (*one.opts, *one.secondary_opts)}


def test_a_flag_in_the_text_is_one_of_some_command() -> None:
    found = set(re.findall(r"`[^`]*?(--[a-z][a-z-]*)", PROSE))
    assert {"--policy", "--elastic", "--detach"} <= found
    assert found <= known_flags() | {"--help"}


def test_a_value_in_the_text_is_one_the_flag_takes() -> None:
    for flag, value in re.findall(r"`--([a-z-]+) ([^` ]+)`", PROSE):
        key = flag.replace("-", "_")
        if key in Config.model_fields:
            assert str(getattr(Config.load({key: value}), key)) == value


def test_the_model_types_are_those_that_have_a_reader() -> None:
    from engine.models.families import FAMILIES

    _, _, listed = PROSE.partition("whose `model_type` is ")
    assert sorted(re.findall(r"`([a-z0-9_]+)`", listed.partition("GGUF")[0])) == sorted(FAMILIES)


@pytest.mark.parametrize("info", ["sh up", "sh elastic", "sh restart"])
def test_a_command_is_one_that_its_program_takes(info: str) -> None:
    command, *words = shlex.split(readme.block(info))[1:]
    main.commands[command].make_context(command, words)
