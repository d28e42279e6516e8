"""What a client may ask: every field honoured or refused by name, and nothing but our own errors, whatever comes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import params
from router.api import schema
from router.params import Limits, Params
from runtime.config import Config
from runtime.errors import InvalidRequest, PdserveError, Unsupported

LIMITS = Limits.of(Config(), vocab_size=1000, context=2048)


def chat(**fields: Any) -> Params:
    return accept(schema.ChatBody, {"messages": [{"role": "user", "content": "hi"}]} | fields)


def completion(**fields: Any) -> Params:
    return accept(schema.CompletionBody, {"prompt": "hi"} | fields)


def accept(kind: type[Any], fields: Any) -> Params:
    """The way of a body up to the prompt's tokens."""
    return accept_raw(kind, orjson.dumps(fields))


def accept_raw(kind: type[Any], raw: bytes) -> Params:
    body = schema.parse(raw, kind)
    if isinstance(body, schema.ChatBody):
        schema.chat_of(body.messages, body.add_generation_prompt, LIMITS)
    else:
        schema.prompts_of(body.prompt, LIMITS)
    found = schema.params_of(body, Params())
    params.check(found, LIMITS)
    return found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 10**12),
        ("n", -1),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("seed", 1.9e19),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("min_tokens", -1),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("stop", "y" * 257),
        ("stop", [1]),
        ("stop_token_ids", [1000]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(17))),
        ("logit_bias", {"191222": -100}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("user", "u" * 257),
        ("cache_salt", "s" * 257),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "json_object"}),
        ("best_of", 3),
        ("no_such_field", 1),
        ("kv_transfer_params", {"host": "127.0.0.1:6379"}),
        ("metadata", {}),
    ],
)
@pytest.mark.parametrize("kind", [chat, completion])
def test_what_is_out_of_bounds_is_refused_by_name(kind: Any, field: str, value: Any) -> None:
    """Public report T121 (vllm-project/vllm#16529; sgl-project/sglang#7670);
    T058 (vllm-project/vllm#54195); T148 (vllm-project/vllm#36379; BerriAI/litellm#25410)."""
    with pytest.raises(InvalidRequest) as refused:
        kind(**{field: value})

    assert refused.value.field.split(".")[0] == field
    assert "u" * 100 not in refused.value.message


@pytest.mark.parametrize(
    "field",
    ["tools", "tool_choice", "functions", "audio", "modalities", "chat_template", "chat_template_kwargs", "suffix"],
)
def test_what_exists_elsewhere_and_not_here_is_named_unsupported(field: str) -> None:
    with pytest.raises(Unsupported) as refused:
        chat(**{field: ["x"]})

    assert (refused.value.reason, refused.value.field) == ("unsupported", field)


@pytest.mark.parametrize("raw", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_are_not_finite_are_not_json(raw: bytes) -> None:
    """Public report T145 (NVIDIA/TensorRT-LLM#17158; sgl-project/sglang#28153; vllm-project/vllm#45116)."""
    with pytest.raises(InvalidRequest):
        accept_raw(schema.CompletionBody, b'{"prompt":"x","temperature":%b}' % raw)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"1", b'"x"', b"\xff\xfe", b'{"prompt":"\\ud800"}', b"[" * 5000 + b"]" * 5000, b'{"a":' * 3000],
)
def test_a_body_that_is_no_json_object_is_the_clients_fault(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        accept_raw(schema.CompletionBody, raw)

    assert refused.value.field == "body"


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], [-1], [1000], [2**63], [1.5], [True], [[1], [1000]], ["a", 1], {}, 5, [["a"]], ["x"] * 65],
)
def test_empty_and_foreign_prompts_are_refused(prompt: Any) -> None:
    """Public report T037 (vllm-project/vllm#7283; vllm-project/vllm#7746); T146 (sgl-project/sglang#8383;
    vllm-project/vllm#51795)."""
    with pytest.raises(InvalidRequest) as refused:
        completion(prompt=prompt)

    assert refused.value.field == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [1],
        ["hi"],
        [{}],
        [{"role": "user"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "assistant", "content": "x", "tool_calls": []}],
        [{"role": "user", "content": "x", "name": "n" * 257}],
        [{"role": "user", "content": "x"}] * 4097,
        "hi",
        None,
    ],
)
def test_messages_that_cannot_be_honoured_are_refused(messages: Any) -> None:
    """Public report T117 (vllm-project/vllm#49239)."""
    with pytest.raises(InvalidRequest) as refused:
        chat(messages=messages)

    assert refused.value.field.startswith("messages")


def test_log_probability_bounds_are_those_of_each_api() -> None:
    """Public report T051 (sgl-project/sglang#31567); T054 (vllm-project/vllm#4795)."""
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert completion(logprobs=0).logprobs == 0
    assert completion(logprobs=5).logprobs == 5
    for refused in (
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
    ):
        with pytest.raises(InvalidRequest):
            chat(**refused)
    with pytest.raises(InvalidRequest):
        completion(logprobs=6)


def test_null_means_not_given() -> None:
    given = completion(temperature=None, stop=None, seed=None, tools=None, logit_bias=None, n=None)

    assert given == completion()


def test_every_accepted_field_arrives() -> None:
    given = completion(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={"7": -5},
        seed=3,
        max_tokens=10,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=2,
        prompt_logprobs=1,
        echo=True,
        response_format={"type": "text"},
        best_of=2,
        user="me",
    )

    wire = params.sampling(params.clamp(given, 3, LIMITS), (9,))
    assert (given.n, given.stop, given.include_stop, given.skip_special, given.echo) == (
        2,
        ("a", "b"),
        True,
        False,
        True,
    )
    assert list(wire.stop_token_ids) == [4]  # ignore_eos: the model's own end is not added
    assert (wire.seed, wire.max_tokens, wire.min_tokens, wire.top_k) == (3, 10, 2, 5)
    assert wire.logprobs
    assert wire.prompt_logprobs
    assert (wire.top_logprobs, wire.prompt_top_logprobs) == (2, 2)
    assert wire.temperature == pytest.approx(0.5)
    assert [(bias.token, bias.bias) for bias in wire.logit_bias] == [(7, -5.0)]


def test_a_tiny_temperature_is_greedy() -> None:
    """Public report T145 (NVIDIA/TensorRT-LLM#17158; sgl-project/sglang#28153; vllm-project/vllm#45116)."""
    wire = params.sampling(params.clamp(completion(temperature=1e-12), 3, LIMITS), ())

    assert wire.temperature == 0.0


def test_a_prompt_must_leave_room_for_an_answer() -> None:
    params.check_prompt([1] * 2047, LIMITS)
    for length in (2048, 2049, 50_000):
        with pytest.raises(InvalidRequest) as refused:
            params.check_prompt([1] * length, LIMITS)
        assert refused.value.reason == "context_length_exceeded"


def test_max_tokens_is_clamped_to_the_room() -> None:
    assert params.clamp(completion(max_tokens=5000), 48, LIMITS).max_tokens == 2000
    assert params.clamp(chat(), 48, LIMITS).max_tokens == 2000
    assert params.clamp(completion(), 48, LIMITS).max_tokens == 16


def test_the_models_own_defaults_count_where_they_are_sound() -> None:
    defaults = params.model_defaults({"temperature": 0.6, "top_p": 7.0, "top_k": 20, "eos_token_id": 2, "min_p": "x"})

    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 1.0, 20)
    body = schema.parse(b'{"prompt":"x","temperature":1.0}', schema.CompletionBody)
    assert schema.params_of(body, defaults).temperature == 1.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=10), children, max_size=4),
    max_leaves=12,
)
FIELDS = sorted(set(schema.ChatBody.model_fields) | set(schema.CompletionBody.model_fields) | {"tools", "x"})


@settings(max_examples=150, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5), kind=st.sampled_from([chat, completion]))
def test_any_json_is_accepted_or_refused_with_a_field_and_a_small_message(fields: dict[str, Any], kind: Any) -> None:
    try:
        raw = orjson.dumps(fields)
    except TypeError:  # an integer JSON parsers do not take
        return
    error = refusal(kind, orjson.loads(raw))
    if error is not None:
        assert error.row.http_status == 400
        assert error.field
        assert len(error.message) < 1000


def refusal(kind: Any, fields: dict[str, Any]) -> PdserveError | None:
    try:
        kind(**fields)
    except PdserveError as error:
        return error
    return None


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=60))
def test_any_bytes_are_accepted_or_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        accept_raw(schema.CompletionBody, raw)
