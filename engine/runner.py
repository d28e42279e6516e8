"""The torch runner: a function of a StepPlan and of the pages it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.flops import CountedWeights, flops_of
from engine.graphs import DecodeGraphs
from engine.heap import keep_freed_memory
from engine.kernels.cpu.build import Compiled, compiled, using
from engine.kernels.cpu.decode import MAX_ROWS, CompiledDecoder
from engine.kernels.ops import uses_triton
from engine.layers.batch import Inputs
from engine.layers.pools import Pools
from engine.models.families import check_together, family_of
from engine.models.llama import LlamaConfig, LlamaModel
from engine.models.registry import ModelConfig, build, model_config
from engine.native import default_cache
from engine.plan import Logprob, Row, RowResult, StepPlan, StepResult
from engine.runner_api import ModelSpec, RowsFailed
from engine.sampler import Sampled, logprobs, sample
from engine.weights import WeightSource, open_weights
from kvtransfer.types import Region
from runtime.config import Config
from runtime.errors import InvalidRequest, Unsupported
from runtime.modelfiles import ModelFiles

PROMPT_SCORE_ROWS = 64
"""Prompt log-probabilities are taken so many rows at a time: a whole chunk's logits would be hundreds of megabytes."""

GRAPH_ROWS = 256
"""Larger steps keep the device busy by themselves."""

DETERMINISTIC_ROWS = 4
"""Least rows of a matmul in deterministic mode: a row's result is the same for any number from here on."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """dtype and device as torch names, or auto. max_model_len: 0 = the model's own. threads: 0 = torch's own.

    compile: decode steps run in code compiled for this CPU, kept under compile_cache ("" = the user's cache folder).
    replay_len: decode steps of recurrent layers keep records and rewrite the state once every so many; 0 = every step.
    graph_rows: on a GPU decode steps of up to so many rows are CUDA graphs; 0 = none are.
    fused: on a CPU the layers of hybrid models run decode rows in compiled code, where there is a compiler.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int = 0
    threads: int = 0
    deterministic: bool = False
    compile: bool = False
    compile_cache: str = ""
    replay_len: int = 0
    graph_rows: int = 0
    fused: bool = True

    @classmethod
    def of(cls, config: Config) -> RunnerOptions:
        return cls(
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            threads=config.threads,
            deterministic=config.deterministic,
            compile=config.compile,
            compile_cache=config.compile_cache,
            replay_len=config.replay_len if config.replay_ssm else 0,
            graph_rows=min(config.max_batch, GRAPH_ROWS) if config.cuda_graphs else 0,
        )


def load_runner(files: ModelFiles, config: Config, progress: Callable[[float], None] = lambda _: None) -> TorchRunner:
    """Open a model's weights as the configuration says. progress is called with the fraction loaded."""
    keep_freed_memory()
    source = open_weights(Path(files.path), files.kind, files.config, config.load_format, config.seed)
    return TorchRunner(files.config, source, RunnerOptions.of(config), tuple(files.eos_token_ids), progress)


class TorchRunner:
    """Implements engine.runner_api.Runner for the models of engine/models."""

    def __init__(
        self,
        config: Mapping[str, Any],
        source: WeightSource,
        options: RunnerOptions,
        eos_token_ids: tuple[int, ...] = (),
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        check_together(
            family_of(config),
            compiled=options.compile,
            replayed=bool(options.replay_len),
            deterministic=options.deterministic,
        )
        if options.threads:
            torch.set_num_threads(options.threads)
        model = model_config(config)
        if options.max_model_len > model.max_len:
            raise InvalidRequest(
                "max_model_len is longer than the model's", field="max_model_len", limit=str(model.max_len)
            )
        self._device = _device(options.device)
        if options.deterministic and self._device.type == "cuda":
            raise Unsupported(
                "a GPU's matmuls differ with their rows: deterministic needs a CPU", field="deterministic"
            )
        self._dtype = _dtype(options.dtype, source.dtype(), self._device)
        self._max_len = options.max_model_len or model.max_len
        self._eos = eos_token_ids
        counted = CountedWeights(source)
        self._compile_cache = Path(options.compile_cache) if options.compile_cache else default_cache()
        self.layers_compiled = self._compiled_layers(model, options)
        with torch.inference_mode(), using(self.layers_compiled):
            self._model = build(
                model, counted, self._dtype, self._device, self._max_len, progress, compiled=options.compile
            )
        self._flops = flops_of(config, self._model.groups, counted)
        self._ring = max(options.replay_len, 1)
        self._inputs = Inputs(
            self._model.groups,
            self._device,
            alone=options.deterministic,
            min_rows=DETERMINISTIC_ROWS if options.deterministic else 1,
            ring=self._ring,
        )
        self._min_rows = DETERMINISTIC_ROWS if options.deterministic else 1
        self._pools: Pools | None = None
        self._compile = options.compile
        self._decoder: CompiledDecoder | None = None
        self._graph_rows = options.graph_rows if uses_triton(self._device) and not options.deterministic else 0
        self._graphs: DecodeGraphs | None = None

    def _compiled_layers(self, model: ModelConfig, options: RunnerOptions) -> Compiled | None:
        """What hybrid models' layers run their decode rows with; None = tensor operations."""
        if isinstance(model, LlamaConfig) or not options.fused or uses_triton(self._device):
            return None
        return compiled(self._compile_cache, products=not options.deterministic)

    def spec(self) -> ModelSpec:
        return ModelSpec(
            vocab_size=self._model.vocab_size,
            max_model_len=self._max_len,
            components=self._model.groups.components(),
            eos_token_ids=self._eos,
            dtype=str(self._dtype).removeprefix("torch."),
            device=self._device.type,
            token_flops=self._flops[0],
            pair_flops=self._flops[1],
            record_bytes=self._model.groups.state.ring_bytes(self._ring) if self._model.groups.state else 0,
        )

    def allocate(self, num_pages: int, num_slots: int) -> None:
        assert self._pools is None, "allocate() is called once"
        with torch.inference_mode():
            self._pools = Pools(self._model.groups, num_pages, num_slots, self._device, self._ring)
            if self._compile:
                assert isinstance(self._model, LlamaModel), "build() refuses the others"
                pages = self._pools.kv.pool.pages
                self._decoder = CompiledDecoder(self._model.decode_model(), pages, self._compile_cache)
            if self._graph_rows:
                self._graphs = DecodeGraphs(
                    self._model, self._pools, self._max_len, self._ring, self._device, self._graph_rows
                )
        self._finish()  # peers may read and write from here on

    def regions(self) -> tuple[Region, ...]:
        return self._memory().regions()

    def close(self) -> None:
        self._pools = self._decoder = self._graphs = None

    def _memory(self) -> Pools:
        assert self._pools is not None, "allocate() comes first"
        return self._pools

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self._memory().copy(copy)
        results: list[tuple[RowResult, bool]] = []
        if plan.rows:
            results = self._run_compiled(plan.rows) if self._compiles(plan.rows) else self._run_model(plan.rows)
        self._finish()
        failed = tuple(r.seq for r, finite in results if not finite)
        kept = tuple(r for r, finite in results if finite)
        if failed:
            raise RowsFailed(failed, StepResult(plan.step, kept))
        return StepResult(plan.step, kept)

    def _finish(self) -> None:
        """Wait until all that this thread asked of the device is done: the pages may be read by a peer now, and the
        host buffers of the step's inputs be written again. Copies of others on the device are not waited for."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _compiles(self, rows: tuple[Row, ...]) -> bool:
        fits = self._decoder is not None and len(rows) <= MAX_ROWS
        return fits and all(r.is_decode and not r.prompt_targets for r in rows)

    def _run_compiled(self, rows: tuple[Row, ...]) -> list[tuple[RowResult, bool]]:
        assert self._decoder is not None
        logits = self._decoder.run([r.tokens[0] for r in rows], [r.start for r in rows], [r.pages for r in rows])
        return _decoded(rows, logits)

    def _run_model(self, rows: tuple[Row, ...]) -> list[tuple[RowResult, bool]]:
        if self._graphs is not None and self._graphs.takes(rows):
            return _decoded(rows, self._graphs.logits(rows))
        step = self._inputs.build(rows)
        hidden = self._model.forward(step, self._memory())
        sampling = [i for i, row in enumerate(rows) if row.samples]
        logits = self._logits(hidden, [step.spans[i][1] - 1 for i in sampling]) if sampling else hidden[:0]
        sampled = _sample(rows, sampling, logits)
        prompt = [tuple(self._prompt_scores(row, span, hidden)) for row, span in zip(rows, step.spans, strict=True)]
        return [_result(row, s, p) for row, s, p in zip(rows, sampled, prompt, strict=True)]

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """[len(rows), vocab] of the given tokens of the step."""
        padded = rows + [rows[-1]] * (self._min_rows - len(rows))
        return self._model.logits(hidden[padded])[: len(rows)]

    def _prompt_scores(self, row: Row, span: tuple[int, int], hidden: torch.Tensor) -> Iterator[Logprob]:
        assert len(row.prompt_targets) <= len(row.tokens)
        for begin in range(0, len(row.prompt_targets), PROMPT_SCORE_ROWS):
            targets = row.prompt_targets[begin : begin + PROMPT_SCORE_ROWS]
            first = span[0] + begin
            logits = self._logits(hidden, list(range(first, first + len(targets)))).float()
            ids = torch.tensor(targets, dtype=torch.int64, device=hidden.device)
            yield from logprobs(logits, ids, [row.prompt_top] * len(targets))


def _decoded(rows: tuple[Row, ...], logits: torch.Tensor) -> list[tuple[RowResult, bool]]:
    """Results of a decode step; logits: one line per row."""
    sampling = [i for i, row in enumerate(rows) if row.samples]
    sampled = _sample(rows, sampling, logits if len(sampling) == len(rows) else logits[sampling])
    return [_result(row, s, ()) for row, s in zip(rows, sampled, strict=True)]


def _sample(rows: tuple[Row, ...], sampling: list[int], logits: torch.Tensor) -> list[list[Sampled]]:
    """logits: one line for each of the rows that sample. -> each row's tokens."""
    out: list[list[Sampled]] = [[] for _ in rows]
    pairs = [(at, i, spec) for at, i in enumerate(sampling) for spec in rows[i].samples]
    if pairs:
        drawn = sample(logits, [at for at, _, _ in pairs], [spec for _, _, spec in pairs])
        for (_, i, _), token in zip(pairs, drawn, strict=True):
            out[i].append(token)
    return out


def _result(row: Row, sampled: list[Sampled], prompt: tuple[Logprob, ...]) -> tuple[RowResult, bool]:
    """The row's result, and whether its logits were numbers."""
    wanted = any(s.logprob is not None for s in sampled)
    result = RowResult(
        seq=row.seq,
        tokens=tuple(s.token for s in sampled),
        logprobs=tuple(s.logprob for s in sampled) if wanted else (),
        prompt=prompt,
    )
    return result, all(s.finite for s in sampled)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("device cuda was asked for and there is none", field="device")
    return torch.device(name)


def _dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """fp16 checkpoints run as bf16: fp16 matmuls on a CPU are hundreds of times slower, and bf16 is what we test."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if checkpoint == torch.float32:
        return torch.float32
    native = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32
