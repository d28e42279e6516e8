from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from protos import generate

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the contract that a test may break."""
    shutil.copytree(ROOT / "protos" / "v1", tmp_path / "protos" / "v1", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def check(root: Path) -> int:
    return generate.main(["--check", "--root", str(root)])


def edit(root: Path, file: str, old: str, new: str) -> None:
    path = root / "protos" / "v1" / file
    text = path.read_text()
    assert re.search(old, text)
    path.write_text(re.sub(old, new, text, count=1))


def test_the_committed_stubs_are_what_the_protos_give() -> None:
    assert check(ROOT) == 0


def test_an_edited_or_missing_stub_is_noticed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "protos" / "v1" / "common_pb2.py").write_text("# edited\n")
    (checkout / "protos" / "v1" / "decode_pb2.pyi").unlink()
    (checkout / "protos" / "v1" / "old_pb2.py").write_text("")
    assert check(checkout) == 1
    said = capsys.readouterr().err
    assert all(name in said for name in ("common_pb2.py ", "decode_pb2.pyi", "old_pb2.py is left over"))


def test_an_addition_is_drift_until_generated_and_then_fine(checkout: Path) -> None:
    edit(checkout, "common.proto", r"message Adapter \{", "message Adapter {\n  string extra = 9;")
    assert check(checkout) == 1
    assert generate.main(["--root", str(checkout)]) == 0
    assert check(checkout) == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"string version = 2;\n", "", "Adapter.version was removed and 2 is not reserved"),
        (r"string version = 2;", "bytes version = 2;", "Adapter.version = 2 changed"),
        (r"string version = 2;", "string release = 2;", "Adapter.version = 2 changed"),
        (r"string version = 2;", "repeated string version = 2;", "Adapter.version = 2 changed"),
        (r"ROLE_BOTH = 3;", "", "ROLE_BOTH was removed and 3 is not reserved"),
        (r"ROLE_BOTH = 3;", "ROLE_ALL = 3;", "ROLE_BOTH = 3 is now ROLE_ALL"),
        (r"ROLE_UNSPECIFIED = 0;", "ROLE_NONE = 0;", "has no ..._UNSPECIFIED"),
    ],
)
def test_a_change_that_breaks_peers_is_named_and_not_generated(
    checkout: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    before = (checkout / generate.DESCRIPTORS).read_bytes()
    edit(checkout, "common.proto", old, new)
    assert generate.main(["--root", str(checkout)]) == 1
    assert said in capsys.readouterr().err
    assert (checkout / generate.DESCRIPTORS).read_bytes() == before


def test_a_removed_number_that_is_reserved_is_fine_and_stays_reserved(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(checkout, "common.proto", r"string version = 2;", "reserved 2;")
    edit(checkout, "common.proto", r"ROLE_BOTH = 3;", "reserved 3;")
    assert generate.main(["--root", str(checkout)]) == 0
    edit(checkout, "common.proto", r"reserved 2;", "string other = 2;")
    assert generate.main(["--root", str(checkout)]) == 1
    assert "reserved number 2" in capsys.readouterr().err


def test_a_removed_method_is_named(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(checkout, "registry.proto", r"  rpc List\(.*\n", "")
    assert generate.main(["--root", str(checkout)]) == 1
    assert "method pdserve.v1.Registry/List was removed" in capsys.readouterr().err
