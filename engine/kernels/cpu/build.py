"""The compiled functions, and who may use them while a model is built."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.native import NotBuilt, library

_log = logging.getLogger(__name__)

HERE = Path(__file__).parent

FLAGS = ("-fno-math-errno", "-fopenmp")


@dataclass(frozen=True, slots=True)
class Compiled:
    """The libraries. products: whether matrix products of few rows may use theirs. A step of many rows uses oneDNN's,
    whose sums may be made in another order: not for rows that must not depend on how many others there are."""

    products_library: ctypes.CDLL
    recurrent_library: ctypes.CDLL
    latent_library: ctypes.CDLL
    products: bool = True


_current: ContextVar[Compiled | None] = ContextVar("compiled", default=None)


def current() -> Compiled | None:
    """What the layers that are being built may use."""
    return _current.get()


@contextmanager
def using(compiled: Compiled | None) -> Iterator[None]:
    """Layers built inside use it."""
    token = _current.set(compiled)
    try:
        yield
    finally:
        _current.reset(token)


def compiled(cache: Path | None, *, products: bool) -> Compiled | None:
    """Build what is not in the cache yet. None where it cannot be built."""
    try:
        link = openmp_of_torch()
        names = ("products", "recurrent", "latent")
        first, second, third = (library(HERE / f"{name}.cpp", cache, FLAGS, link) for name in names)
    except NotBuilt as error:
        _log.warning("decode steps of hybrid layers are not compiled, they will be slower", extra={"why": str(error)})
        return None
    return Compiled(first, second, third, products)


def openmp_of_torch() -> list[str]:
    """torch brings its own libgomp: a second one would bring a second, spinning pool of threads."""
    root = Path(torch.__file__).parent
    found = sorted([*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")])
    return [str(found[0])] if found else ["-lgomp"]
