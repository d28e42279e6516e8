"""Refuses what an engine could not run, before anything is taken for it."""

from __future__ import annotations

from engine.api import EngineRequest
from engine.runner_api import ModelSpec
from runtime.errors import InvalidRequest

MAX_CHOICES = 4096


def check_request(request: EngineRequest, model: ModelSpec, max_model_len: int) -> None:
    """Raises InvalidRequest naming the field."""
    known = len(request.tokens)
    if not 0 < request.prompt_len <= known:
        raise InvalidRequest("prompt_len must lie within the tokens, and there must be at least one", field="tokens")
    if known >= max_model_len:
        text = f"{known} tokens leave no room for an answer in a context of {max_model_len}"
        raise InvalidRequest(text, reason="context_length_exceeded", field="tokens", limit=str(max_model_len))
    if min(request.tokens) < 0 or max(request.tokens) >= model.vocab_size:
        raise InvalidRequest("a token id is outside the vocabulary", field="tokens", limit=str(model.vocab_size))
    if known - request.prompt_len >= request.sampling.max_tokens:
        raise InvalidRequest("max_tokens leaves nothing to generate", field="max_tokens")
    if not 1 <= request.n <= MAX_CHOICES:
        raise InvalidRequest("n is out of range", field="n", limit=str(MAX_CHOICES))
    if request.n > 1 and (request.choice or known != request.prompt_len):
        raise InvalidRequest("a continuation has one choice", field="n")
    if len(request.root) != 32:
        raise InvalidRequest("the hash root must have 32 bytes", field="root")
    if any(not 0 <= position < known for position, _ in request.unit_extras):
        raise InvalidRequest("an item lies outside the tokens", field="unit_extras")
    bad = [t for t in request.sampling.stop_token_ids if not 0 <= t < model.vocab_size]
    bad += [t for t, _ in request.sampling.logit_bias if not 0 <= t < model.vocab_size]
    if bad:
        raise InvalidRequest("a token id is outside the vocabulary", field="sampling", limit=str(model.vocab_size))
