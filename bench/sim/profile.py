"""Timing profiles: what one kind of worker costs, in seconds, bytes and tokens. Read strictly: a term nobody uses, or
one that is missing, is refused, since a profile that is half understood simulates something else.

Only the simulator reads them; what predicts must learn from reports.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from runtime.errors import InvalidRequest

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Model:
    """kind: "dense" or "hybrid". layers: names the model, no time or size depends on it. checkpoint_interval: tokens
    between states a prefill leaves behind (hybrid)."""

    kind: str
    layers: int
    kv_bytes_per_token: float
    state_bytes: float
    checkpoint_interval: int = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """disk_kv_tokens: not given by the shipped profiles; 0 = four times host memory."""

    kv_tokens: int
    state_slots: int
    host_kv_tokens: int
    max_batch: int
    host_state_slots: int = 0
    disk_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """fixed_s a prompt, per_token_s an uncached token, per_token_context_s for each of its context, per_chunk_s."""

    fixed_s: float
    per_token_s: float
    per_token_context_s: float
    chunk_tokens: int
    per_chunk_s: float


@dataclass(frozen=True, slots=True)
class Decode:
    fixed_s: float
    per_request_s: float
    per_context_token_s: float


@dataclass(frozen=True, slots=True)
class Mixed:
    decode_slowdown_per_prefill_token: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """shared_nic_workers: so many workers hang on one NIC of this bandwidth."""

    setup_s: float
    bandwidth_Bps: float  # noqa: N815  the profile's key
    shared_nic_workers: int


@dataclass(frozen=True, slots=True)
class Tiers:
    host_Bps: float  # noqa: N815  the profile's key
    disk_Bps: float  # noqa: N815  the profile's key
    setup_s: float


@dataclass(frozen=True, slots=True)
class NoiseTerms:
    """Every step: times exp(N(0, sigma)), and with stall_probability times stall_factor. clock_drift_ppm: how far a
    worker's clock, by which it reports, runs fast or slow."""

    lognormal_sigma: float
    stall_probability: float
    stall_factor: float
    clock_drift_ppm: float


@dataclass(frozen=True, slots=True)
class Heterogeneity:
    speed_sigma: float


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    model: Model
    pool: Pool
    prefill: Prefill
    decode: Decode
    mixed: Mixed
    transfer: Transfer
    tiers: Tiers
    noise: NoiseTerms
    heterogeneity: Heterogeneity

    @staticmethod
    def load(path: str | Path) -> Profile:
        """From a YAML file, or the name of a shipped one ("sim-h100-8b"). Raises InvalidRequest (field "sim")."""
        file = find(path)
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
            raise _bad(f"the profile {path} cannot be read") from exc
        return Profile.parse(file.stem, content)

    @staticmethod
    def parse(name: str, content: Any) -> Profile:
        """Raises InvalidRequest."""
        _named("a profile", content, set(_SECTIONS), set(_SECTIONS))
        sections = {key: _section(kind, key, content[key]) for key, kind in _SECTIONS.items()}
        profile = Profile(name, **sections)
        if profile.model.kind not in ("dense", "hybrid"):
            raise _bad("model.kind is dense or hybrid")
        profile._agrees()
        return profile

    def _agrees(self) -> None:
        """Raises InvalidRequest for terms that say nothing, or what cannot be, beside the others."""
        model, pool = self.model, self.pool
        if model.kind == "dense":
            useless = (model.state_bytes, model.checkpoint_interval, pool.state_slots, pool.host_state_slots)
            if any(useless):
                raise _bad("a dense model has no state: state_bytes, checkpoint_interval and slots are 0")
        elif not (model.checkpoint_interval and pool.state_slots):
            raise _bad("a hybrid model needs model.checkpoint_interval and pool.state_slots")
        if pool.host_kv_tokens and model.kind == "hybrid" and not pool.host_state_slots:
            raise _bad("host memory of a hybrid model needs pool.host_state_slots, too")
        if not pool.host_kv_tokens and (pool.disk_kv_tokens or pool.host_state_slots):
            raise _bad("what is below host memory, or in it, needs pool.host_kv_tokens")
        if self.noise.stall_probability > 1:
            raise _bad("noise.stall_probability is at most 1")
        if self.noise.clock_drift_ppm >= 1e6:
            raise _bad("noise.clock_drift_ppm is less than 1e6: a clock does not go back")

    @property
    def disk_tokens(self) -> int:
        return self.pool.disk_kv_tokens or 4 * self.pool.host_kv_tokens

    def prefill_s(self, start: int, tokens: int) -> float:
        """One chunk: `tokens` from position `start` on, without the prompt's fixed part, noise or speed."""
        terms = self.prefill
        context = start + 0.5 * tokens
        return terms.per_chunk_s + tokens * (terms.per_token_s + terms.per_token_context_s * context)

    def step_s(self, batch: int, context: float) -> float:
        """One decode step of `batch` requests with `context` tokens in all."""
        terms = self.decode
        return terms.fixed_s + terms.per_request_s * batch + terms.per_context_token_s * context


_SECTIONS: dict[str, type[Any]] = {
    "model": Model,
    "pool": Pool,
    "prefill": Prefill,
    "decode": Decode,
    "mixed": Mixed,
    "transfer": Transfer,
    "tiers": Tiers,
    "noise": NoiseTerms,
    "heterogeneity": Heterogeneity,
}
_POSITIVE = {
    *("model.layers", "model.kv_bytes_per_token", "pool.kv_tokens", "pool.max_batch", "prefill.chunk_tokens"),
    *("transfer.bandwidth_Bps", "transfer.shared_nic_workers", "tiers.host_Bps", "tiers.disk_Bps"),
    "noise.stall_factor",
}
"""With 0 of these nothing would ever be served, or a chunk would never end."""
_LARGEST = 2.0**53
_DATA = Path(__file__).parent.parent / "data"


def find(path: str | Path) -> Path:
    """The file itself, or the shipped one of that name."""
    for candidate in (Path(path), _DATA / f"{path}.yaml", _DATA / Path(path).name):
        if candidate.is_file():
            return candidate
    raise _bad(f"there is no profile {path}")


def _section(kind: type[_T], key: str, values: Any) -> _T:
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    required = {name for name, field in known.items() if field.default is MISSING}
    _named(key, values, required, set(known))
    return kind(**{name: _typed(f"{key}.{name}", known[name].type, value) for name, value in values.items()})


def _named(what: str, values: Any, required: set[str], known: set[str]) -> None:
    if not isinstance(values, dict):
        raise _bad(f"{what} needs {', '.join(sorted(required))}")
    names = {str(name) for name in values}
    for text, wrong in (("does not know", names - known), ("needs", required - names)):
        if wrong:
            raise _bad(f"{what} {text} {', '.join(sorted(wrong))} (it knows {', '.join(sorted(known))})")


def _typed(name: str, kind: Any, value: Any) -> Any:
    """YAML 1.1 reads 3.8e10, without a sign, as text: numbers are taken from text, too."""
    if kind == "str":
        return str(value)
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError) as exc:
        raise _bad(f"{name} is not a number: {value!r}") from exc
    if not 0 <= number < float("inf"):
        raise _bad(f"{name} must be finite and not negative, not {value!r}")
    if name in _POSITIVE and not number:
        raise _bad(f"{name} is more than 0")
    if kind == "int" and (number != int(number) or number > _LARGEST):
        raise _bad(f"{name} is a whole number, not {value!r}")
    return int(number) if kind == "int" else number


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="sim")
