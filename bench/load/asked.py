"""What was asked for on the command line, made into a plan and an address; what cannot be is refused by its option."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
from click.core import ParameterSource

from bench.load.files import prompt_rows, trace_rows
from bench.load.plan import Arrival, Plan, Range, Row
from bench.load.target import Address, Card
from runtime.errors import InvalidRequest

SHIPPED = Path(__file__).parent.parent / "data" / "mooncake_conversation_trace.jsonl.gz"
REQUESTS, CONCURRENCY = 100, 16
LONGEST = 10_000_000
FASTEST = 1e6
WARM_AT_ONCE = 8
_WARM = 0x5EED
TRACE_VOCAB = 32_000
"""Of the tokens that a trace's hash ids stand for, where the server does not say how many it knows."""


class Number(click.FloatRange):
    """A number within its limits; nan is within none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return found


def length(_: click.Context, __: click.Parameter, value: str) -> Range:
    """N, or LOW:HIGH."""
    low, _colon, high = value.partition(":")
    try:
        found = (int(low), int(high or low))
    except ValueError as exc:
        raise click.BadParameter("a whole number, or LOW:HIGH") from exc
    if not 1 <= found[0] <= found[1] <= LONGEST:
        raise click.BadParameter(f"from 1 to {LONGEST}, the lower one first")
    return found


def rate(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Requests per second, or inf."""
    if value is None:
        return None
    try:
        found = float(value)
    except ValueError as exc:
        raise click.BadParameter("requests per second, or inf") from exc
    if not 0 < found <= FASTEST and found != math.inf:
        raise click.BadParameter(f"more than 0 and at most {FASTEST:g}, or inf")
    return found


@dataclass(frozen=True, slots=True)
class Target:
    """Where to. model: "" = the only one there is."""

    kind: str
    at: str
    model: str
    given: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any], found: Callable[[str], str]) -> Target:
        """found: the HTTP address of the cluster of a state folder, "" where there is none."""
        url, grpc = given["url"], given["grpc_address"]
        if url and grpc:
            raise InvalidRequest("--url and --grpc each name a target: give one", field="grpc")
        if not (url or grpc):
            http = found(given["state_dir"])
            if not http:
                raise InvalidRequest("no cluster was started here by `pdserve up`: give --url or --grpc", field="url")
            url = f"http://{http}"
        if grpc:
            _checked_port(grpc)
        if not (given["api_key"].isascii() and given["api_key"].isprintable()):
            raise InvalidRequest("holds what no header may", field="api_key", limit="printable ASCII")
        return cls("grpc" if grpc else "http", grpc or url, given["model"], given)

    def address(self) -> Address:
        given = self.given
        tls = {name: given[name] for name in ("tls_cert", "tls_key", "tls_ca")}
        made = Address(
            "grpc" if self.kind == "grpc" else "http",
            self.at,
            api_key=given["api_key"],
            chat=given["chat"],
            ignore_eos=given["ignore_eos"],
            timeout_s=given["timeout"],
            **tls,
        )
        if self.kind == "grpc":
            made.config()
        return made


def _checked_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"{address} is no address", field="grpc", limit="HOST:PORT")


@dataclass(frozen=True, slots=True)
class Work:
    """What is sent, before it is known what the server takes. rate and speedup: None = not given."""

    dataset: Any
    file: str
    given: Mapping[str, Any]
    named: frozenset[str]

    @property
    def warmup(self) -> int:
        return int(self.given["warmup"])

    @classmethod
    def of(cls, given: Mapping[str, Any], context: click.Context) -> Work:
        """Raises InvalidRequest for options that say different things, or that would say nothing."""
        named = frozenset(name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE)
        files = [name for name in ("trace", "prompts") if given[name]]
        dataset = given["dataset"] or (files[0] if files else "random")
        if files and files != [dataset]:
            raise InvalidRequest(f"is not what is sent: {dataset} is", field=files[-1])
        if dataset == "prompts" and not files:
            raise InvalidRequest("name the file", field="prompts")
        file = (
            given["prompts"] if dataset == "prompts" else given["trace"] or str(SHIPPED) if dataset == "trace" else ""
        )
        made = cls(dataset, file, given, named)
        made._check()
        return made

    def _check(self) -> None:
        given = self.given
        for only, names in (
            (("prompts",), ("chat", "ignore_eos")),
            (("shared-prefix",), ("groups", "prefix")),
            (("conversations",), ("turns", "think")),
            (("trace",), ("skip", "longest", "speedup")),
            (("random", "shared-prefix", "conversations"), ("input_tokens",)),
            (("random", "shared-prefix", "conversations", "prompts"), ("output",)),
        ):
            for name in names:
                if name in self.named and self.dataset not in only:
                    raise InvalidRequest(
                        f"says nothing of --dataset {self.dataset}", field=name.removesuffix("_tokens")
                    )
        if self.dataset == "prompts" and given["output"][0] != given["output"][1]:
            raise InvalidRequest("one number for prompts that name none", field="output")
        if given["rate"] is not None and given["speedup"] is not None:
            raise InvalidRequest("--rate and --speedup each say how fast requests come: give one", field="speedup")
        if given["rate"] == math.inf and not given["requests"] and given["duration"]:
            raise InvalidRequest("requests that come at once have no end: say how many", field="requests")

    def arrival(self) -> Arrival:
        given = self.given
        if given["rate"] == math.inf:
            return "burst"
        if self.dataset == "trace" and (given["rate"] or given["speedup"] or not given["concurrency"]):
            return "times"
        return "poisson" if given["rate"] else "closed"


def plan_of(work: Work, card: Card, loaders: int) -> Plan:
    """Raises InvalidRequest for what this model cannot take."""
    given, arrival = work.given, work.arrival()
    rows = _rows(work)
    places = given["concurrency"] or (CONCURRENCY if arrival == "closed" else 0)
    if places and places < loaders:
        raise InvalidRequest("each load generator needs a place", field="concurrency", limit=f"at least {loaders}")
    requests = given["requests"] or (0 if given["duration"] else REQUESTS)
    if rows and requests > len(rows):
        if given["requests"]:
            raise InvalidRequest(f"there are only {len(rows)} in the file", field="requests", limit=str(len(rows)))
        requests = len(rows)
    rows = rows[:requests] if requests else rows
    plan = Plan(
        dataset=work.dataset,
        arrival=arrival,
        seed=given["seed"],
        requests=requests,
        duration_s=given["duration"],
        concurrency=places,
        input=given["input_tokens"],
        output=given["output"],
        groups=given["groups"] if work.dataset == "shared-prefix" else 1,
        prefix=given["prefix"] if work.dataset == "shared-prefix" else 0,
        turns=given["turns"] if work.dataset == "conversations" else 1,
        think_s=given["think"],
        vocab=card.vocab or TRACE_VOCAB,
        rows=rows,
    )
    plan = _paced(plan, work)
    _check_context(plan, card)
    return plan


def _rows(work: Work) -> tuple[Row, ...]:
    given = work.given
    if work.dataset == "trace":
        return trace_rows(work.file, skip=given["skip"], longest=given["longest"])
    return prompt_rows(work.file, given["output"][0]) if work.dataset == "prompts" else ()


def _paced(plan: Plan, work: Work) -> Plan:
    """With its rate; a trace keeps its own times, faster or slower."""
    if plan.arrival != "times":
        return replace(plan, rate=work.given["rate"] or 0.0) if plan.arrival == "poisson" else plan
    first, last = plan.rows[0].at, plan.rows[-1].at
    if first == last:
        if work.given["rate"] and len(plan.rows) > 1:
            raise InvalidRequest("all requests of the trace come in one moment, which has no rate", field="rate")
        return replace(plan, arrival="burst")
    rows = tuple(replace(row, at=row.at - first) for row in plan.rows)
    native = len(rows) / (last - first)
    speed = work.given["speedup"] or (work.given["rate"] or native) / native
    return replace(plan, rows=rows, speed=speed, rate=native * speed)


def _check_context(plan: Plan, card: Card) -> None:
    if not card.context or plan.longest() <= card.context:
        return
    if plan.dataset == "trace":
        over = sum(row.prompt + row.output > card.context for row in plan.rows)
        raise InvalidRequest(
            f"{over} of {len(plan.rows)} requests of the trace are longer than the model's context of {card.context} "
            f"tokens: --longest {card.context} leaves them out",
            field="trace",
        )
    field = "prefix" if plan.prefix else "turns" if plan.turns > 1 else "input"
    raise InvalidRequest(
        f"up to {plan.longest()} tokens with the answers are more than the model's context", field=field,
        limit=f"{card.context} tokens",
    )  # fmt: skip


def warm_plan(plan: Plan, count: int, loaders: int) -> Plan | None:
    """Requests of such lengths and other contents, so that nothing of the run is cached before it."""
    if not count:
        return None
    input_, output = plan.input, plan.output
    rows: tuple[Row, ...] = ()
    if plan.dataset == "prompts":
        said = itertools.islice(itertools.cycle(plan.rows), count)
        rows = tuple(Row(output=row.output, text=f"({number}) {row.text}") for number, row in enumerate(said))
    elif plan.rows:
        input_, output = (
            (int(median(values)),) * 2
            for values in ([row.prompt for row in plan.rows], [row.output for row in plan.rows])
        )
    elif plan.prefix:
        input_ = (plan.prefix + input_[0], plan.prefix + input_[1])
    return Plan(
        "prompts" if rows else "random",
        "closed",
        plan.seed ^ _WARM,
        requests=count,
        concurrency=max(WARM_AT_ONCE, loaders),
        input=input_,
        output=output,
        vocab=plan.vocab,
        rows=rows,
    )
