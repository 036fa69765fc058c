"""Kept tokens: how they are asked for, read and joined."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_fast.config import ConfigError, GeneratorConfig, SamplingParams
from skyrl_fast.config.sampling import ADDITIONAL, check_sampling
from skyrl_fast.rollout.continued import generate_through_updates
from skyrl_fast.rollout.engine.protocol import (
    EngineError,
    Generation,
    kept_tokens,
    vllm_sampling_params,
)
from skyrl_fast.rollout.engine.vllm_engine import read_sampled_logprobs
from skyrl_fast.rollout.engine.vllm_patches.kept_logprobs import (
    return_kept_only,
    store_ids_and_values,
)
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.trajectory import Step

KEY = "generator.sampling_params"


def check(*, trained: bool = True, **options: Any) -> None:
    check_sampling(KEY, SamplingParams(**options), trained=trained)


@pytest.mark.spec("kept.request")
@pytest.mark.parametrize(
    ("options", "top_k", "logprobs"),
    [
        ({}, -1, 0),
        ({"top_p": 0.9}, 256, 272),
        ({"top_p": 0.9, "max_kept_tokens": 8}, 8, 24),
        ({"top_k": 20}, 20, 36),
        ({"min_p": 0.1, "top_k": 5}, 5, 21),
        ({"additional_kwargs": {"min_tokens": 4}}, 256, 272),
        ({"additional_kwargs": {"min_tokens": 0}}, -1, 0),
        ({"top_p": 0.9, "max_kept_tokens": None}, -1, 0),
    ],
)
def test_request_has_a_limit_and_enough_logprobs(options: Any, top_k: int, logprobs: int) -> None:
    request = vllm_sampling_params(SamplingParams(**options), seed=1)
    assert (request["top_k"], request["logprobs"]) == (top_k, logprobs)


@pytest.mark.spec("kept.request")
def test_no_more_logprobs_than_words_and_none_in_evaluation() -> None:
    sampling = SamplingParams(top_p=0.9)
    assert vllm_sampling_params(sampling, seed=1, vocab_size=100)["logprobs"] == 100
    generator = GeneratorConfig(sampling_params=sampling)
    assert vllm_sampling_params(generator.sampling("train"), seed=1)["logprobs"] == 272
    evaluation = vllm_sampling_params(generator.sampling("eval"), seed=1)
    assert (evaluation["logprobs"], evaluation["top_k"]) == (0, -1)


@pytest.mark.spec("kept.read")
def test_kept_tokens_are_those_that_were_not_excluded() -> None:
    ids = np.array([7, 9, 7, 3, 5])  # the sampled token first, and again at its rank
    logprobs = np.log([0.25, 0.5, 0.25, 0.25, 1e-9])
    logprobs[4] = -np.inf
    assert kept_tokens(7, ids, logprobs).tolist() == [3, 7, 9]
    logprobs[4] = -9999.0  # of a server
    assert kept_tokens(7, ids, logprobs).tolist() == [3, 7, 9]


@pytest.mark.spec("async.server-answers")
@pytest.mark.parametrize("other", [2**32 + 9, -9])  # the first is 9 in 32 bits
def test_ids_that_tensors_cannot_hold_fail_the_request(other: int) -> None:
    with pytest.raises(EngineError, match=f"expected ids from 0 to 2147483647.*{other}"):
        kept_tokens(7, np.array([7, other]), np.log([0.5, 0.5]))


@pytest.mark.parametrize(
    ("ids", "probabilities"), [([7, 9], [0.25, 0.5]), ([9, 3], [0.5, 0.5]), ([7, 9], [0.75, 0.5])]
)
def test_missing_tokens_fail_the_request(ids: list[int], probabilities: list[float]) -> None:
    with pytest.raises(EngineError, match="expected all tokens that token 7 was sampled from"):
        kept_tokens(7, np.array(ids), np.log(probabilities))


@pytest.mark.spec("kept.refused")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 1.1}, rf"{KEY}.repetition_penalty: expected 1 in training"),
        ({"additional_kwargs": {"logit_bias": {5: 1.0}}}, "expected no logit_bias in training"),
        ({"additional_kwargs": {"presence_penalty": 0.5}}, "expected no presence_penalty"),
        ({"top_k": 300}, rf"{KEY}.top_k: expected at most max_kept_tokens=256.*got 300"),
        ({"top_p": 0.9, "max_kept_tokens": None}, f"{KEY}.max_kept_tokens: expected a number"),
        ({"temperature": 0.0}, rf"{KEY}.temperature: expected > 0 in training, got 0"),
    ],
)
def test_sampling_that_the_trainer_cannot_repeat_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(**options)
    check(trained=False, **options)


@pytest.mark.spec("kept.known-parameters")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"min_token": 4},
            r"expected vLLM parameters of allowed.*got min_token \(did you mean 'min_",
        ),
        ({"guided_json": {}}, "got guided_json"),
        ({"best_of": 2}, "got best_of"),
        ({"use_beam_search": None}, "got use_beam_search"),
        ({"extra_args": {}}, "got extra_args"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "got repetition_detection"),
        ({"skip_reading_prefix_cache": True}, "got skip_reading_prefix_cache"),
        (
            {"min_tokens": 9},
            "min_tokens: expected an integer from 0 to max_generate_length=8, got 9",
        ),
        ({"min_tokens": "4"}, "min_tokens: expected an integer from 0 .* got '4'"),
        ({"min_tokens": True}, "min_tokens: expected an integer from 0 .* got True"),
    ],
)
def test_parameters_that_engines_read_differently_are_refused(
    more: dict[str, Any], message: str, trained: bool
) -> None:
    with pytest.raises(ConfigError, match=f"{KEY}.additional_kwargs.*{message}"):
        check(trained=trained, max_generate_length=8, additional_kwargs=more)


@pytest.mark.vllm
@pytest.mark.spec("kept.known-parameters")
def test_engine_and_server_of_vllm_know_the_accepted_parameters() -> None:
    from vllm import SamplingParams as OfEngine
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest as OfServer

    assert set(ADDITIONAL) <= set(OfEngine.__struct_fields__) & set(OfServer.model_fields)


@pytest.mark.spec("kept.refused")
def test_settings_without_an_effect_are_accepted() -> None:
    check(additional_kwargs={"logit_bias": None, "presence_penalty": 0.0})
    check(max_kept_tokens=None)


@pytest.mark.spec("kept.record")
async def test_sets_are_joined_across_weight_updates() -> None:
    parts = [
        Generation([5, 6], [-0.1, -0.2], "interrupted", kept_ids=[ids(5), ids(6, 8)]),
        Generation([], [], "interrupted", kept_ids=[]),
        Generation([7], [-0.3], "stop", kept_ids=[ids(2, 7)]),
    ]

    class Engine:
        async def generate(self, *_: Any, **__: Any) -> Generation:
            return parts.pop(0)

    generation = await generate_through_updates(
        Engine(),
        WeightGate(),
        None,
        [1],
        SamplingParams(max_generate_length=8),
        session_id="a",
        part_seed=lambda part: part,
    )
    assert [one.tolist() for one in generation.kept_ids or []] == [[5], [6, 8], [2, 7]]
    step = Step.from_generation([1], generation, text="", appended_end=3)
    assert step.versions == [0] * 4
    assert [one.tolist() for one in step.kept_ids or []] == [[5], [6, 8], [2, 7], []]


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.vllm
@pytest.mark.parametrize(("asked", "wanted"), [(272, 2), (1, 1), (-1, -1)])
def test_engine_returns_no_more_columns_than_a_token_has_kept(asked: int, wanted: int) -> None:
    class Sampler:
        def gather_logprobs(self, logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
            return num_logprobs, logprobs, token_ids

    sampler = Sampler()
    return_kept_only(sampler)
    excluded = -torch.inf
    logprobs = torch.tensor([[-0.7, excluded, -0.7], [excluded, excluded, 0.0]])
    got = sampler.gather_logprobs(logprobs, asked, token_ids=torch.tensor([0, 2]))
    assert got[0] == wanted
    return_kept_only(object())  # a sampler of another kind is left alone


@pytest.mark.vllm
@pytest.mark.parametrize("rows", [1, 33])
def test_sampled_tokens_have_the_logprobs_and_ranks_of_vllm(rows: int) -> None:
    from vllm.v1.sample.sampler import Sampler

    torch.manual_seed(rows)
    logprobs = torch.randn(rows, 50).log_softmax(dim=-1)
    logprobs[:, 3] = logprobs[:, 4]  # equal ones
    sampled = torch.randint(0, 50, (rows,))
    wanted = Sampler.gather_logprobs(logprobs, 0, token_ids=sampled)
    sampler = Sampler()
    return_kept_only(sampler)
    got = sampler.gather_logprobs(logprobs, 0, token_ids=sampled)
    assert got.logprob_token_ids.dtype == wanted.logprob_token_ids.dtype
    assert torch.equal(got.logprob_token_ids, wanted.logprob_token_ids)
    assert torch.equal(got.logprobs, wanted.logprobs)
    assert torch.equal(got.selected_token_ranks, wanted.selected_token_ranks)


@pytest.mark.vllm
@pytest.mark.parametrize("columns", [1, 3])
def test_encoded_logprobs_are_those_that_vllm_encodes(columns: int) -> None:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    class Sampler:
        def gather_logprobs(self, logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
            values, ids = logprobs.topk(num_logprobs)
            return LogprobsTensors(ids.int(), values, torch.arange(len(ids)))

    sampler = Sampler()
    return_kept_only(sampler)
    asked, sampled = (0 if columns == 1 else columns), torch.arange(5)
    tensors = sampler.gather_logprobs(torch.randn(5, 40), asked, token_ids=sampled)
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutput)
    usual = LogprobsTensors(*tensors).tolists()
    for start, number in ((0, 1), (2, 2), (4, 1), (5, 0)):
        encoded, wanted = (
            encoder.encode(
                EngineCoreOutput("r", [7], new_logprobs=lists.slice_request(start, number))
            )
            for lists in (tensors.tolists(), usual)
        )
        assert list(map(bytes, encoded)) == list(map(bytes, wanted))
        got = decoder.decode(encoded).new_logprobs
        assert np.array_equal(got.logprobs, usual.logprobs[start : start + number])
    # Of speculative decoding, a request has several rows.
    assert type(tensors.tolists([0, 2, 5])) is type(usual)


@pytest.mark.vllm
@pytest.mark.parametrize("flat", [False, True])
def test_logprobs_are_stored_without_texts(flat: bool) -> None:
    """Those of requests in vLLM's usual form, which a program next to the trainer makes, have."""
    from vllm.v1.engine import output_processor
    from vllm.v1.outputs import LogprobsLists

    store_ids_and_values()
    parameters = SimpleNamespace(num_logprobs=2, prompt_logprobs=None, flat_logprobs=flat)
    request = SimpleNamespace(sampling_params=parameters)
    processor = output_processor.LogprobsProcessor.from_new_request(None, request)
    for token in (5, 6):
        token_ids = np.array([[token, 8, 9]])
        logprobs = np.array([[-0.7, -0.7, -np.inf]])
        processor._update_sample_logprobs(LogprobsLists(token_ids, logprobs, np.array([1])))
    assert processor.cumulative_logprob == pytest.approx(-1.4)
    if flat:
        stored = processor.logprobs
        assert (stored.token_ids, stored.logprobs) == ([5, 8, 6, 8], [-0.7] * 4)
        assert (stored.start_indices, stored.end_indices) == ([0, 2], [2, 4])
    else:
        assert [sorted(entry) for entry in processor.logprobs] == [[5, 8, 9], [6, 8, 9]]


def test_logprobs_of_other_tokens_are_refused() -> None:
    flat = SimpleNamespace(token_ids=[5, 6], logprobs=[-0.1, -0.2])
    flat.start_indices, flat.end_indices = [0, 1], [1, 2]
    assert read_sampled_logprobs([5, 6], flat, keeps=False) == ([-0.1, -0.2], None)
    with pytest.raises(ValueError, match="of the 1 sampled tokens, got those of 2 others"):
        read_sampled_logprobs([5], flat, keeps=False)
    flat.start_indices, flat.end_indices = [0, 2], [2, 2]  # the second has none
    with pytest.raises(IndexError):
        read_sampled_logprobs([5, 6], flat, keeps=True)
