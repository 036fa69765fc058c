"""The command with a real engine, in a process that is killed and started again."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from examples.tinker.run import write_model
from skyrl_fast.cli import main

tinker = pytest.importorskip("tinker", reason="the Tinker SDK is not installed")
types = pytest.importorskip("tinker.types")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

# Float32 in two engines with other orders of sums.
CLOSE = 1e-5
MODEL = ("--to", "model")
IN_MEMORY = 16  # adapters that the engine keeps; others are loaded again


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """Yield a client's address and key, and the server's process."""
    command = [sys.executable, "-m", "skyrl_fast", "tinker", str(model)]
    process = subprocess.Popen(
        [*command, "--folder", str(folder), "--port", "0", "trainer.seed=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        printed = ""
        while "tinker://" not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        url, key = re.findall(r"export TINKER_\w+=(\S+)", printed)
        assert f" {url}/v1 for OpenAI's" in printed
        yield {"base_url": url, "api_key": key}, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def prompt(*tokens: int) -> Any:
    return types.ModelInput.from_ints(list(tokens))


def datum(*tokens: int) -> Any:
    weights = np.ones(len(tokens) - 1, np.float32)
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": weights}
    return types.Datum(model_input=prompt(*tokens[:-1]), loss_fn_inputs=inputs)


def train(model: Any, *tokens: int, rate: float = 1e-2) -> None:
    model.forward_backward([datum(*tokens)], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=rate)).result()


def trained_logprobs(model: Any, *tokens: int) -> list[float]:
    result = model.forward([datum(*tokens)], "cross_entropy").result()
    return result.loss_fn_outputs[0]["logprobs"].to_torch().tolist()


@pytest.mark.spec("tinker.raw-logprobs", "tinker.frozen")
@pytest.mark.ci
def test_a_real_engine_samples_what_was_trained_and_survives_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of Qwen3, as vLLM would take its head for a module with adapters.
    model = write_model(tmp_path / "model")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    name = str(model)
    with serving(model, tmp_path) as (address, process):
        client = tinker.ServiceClient(**address)
        small, large = (
            client.create_lora_training_client(
                name, rank=rank, seed=1, train_unembed=False
            ).result()
            for rank in (4, 32)
        )
        base = client.create_sampling_client(base_model=name).result()
        of_base = base.compute_logprobs(prompt(1, 2, 3, 4, 5)).result()
        for _ in range(3):
            train(small, 1, 2, 3, 4, 5)
            train(large, 5, 4, 3, 2, 1)
        samplers = [one.save_weights_and_get_sampling_client().result() for one in (small, large)]

        # Requests with either adapter and with none, in the engine at the same time.
        hot = types.SamplingParams(max_tokens=6, temperature=2.0, top_k=50, seed=7)
        futures = [
            one.sample(prompt(1, 2, 3), num_samples=2, sampling_params=hot)
            for one in (*samplers, base) * 3
        ]
        answers = [future.result() for future in futures]
        for place, trained in enumerate((small, large)):
            for sequence in answers[place].sequences:
                tokens = (1, 2, 3, *sequence.tokens)
                expected = trained_logprobs(trained, *tokens)[2:]
                assert sequence.logprobs == pytest.approx(expected, abs=CLOSE)
            again = answers[place + 3]
            assert [s.tokens for s in again.sequences] == [
                s.tokens for s in answers[place].sequences
            ]
        assert base.compute_logprobs(prompt(1, 2, 3, 4, 5)).result() == of_base

        then = samplers[0].compute_logprobs(prompt(1, 2, 3, 4, 5)).result()
        assert then[1:] == pytest.approx(trained_logprobs(small, 1, 2, 3, 4, 5), abs=CLOSE)
        for _ in range(IN_MEMORY + 2):  # so that the first is evicted
            train(small, 1, 2, 3, 4, 5, rate=1e-3)
            other = small.save_weights_and_get_sampling_client().result()
            other.compute_logprobs(prompt(1, 2)).result()
        now = other.compute_logprobs(prompt(1, 2, 3, 4, 5)).result()
        assert now[1:] == pytest.approx(trained_logprobs(small, 1, 2, 3, 4, 5), abs=CLOSE)
        assert max(abs(a - b) for a, b in zip(now[1:], then[1:], strict=True)) > 100 * CLOSE
        assert samplers[0].compute_logprobs(prompt(1, 2, 3, 4, 5)).result() == then

        topk = (
            samplers[0]
            .sample(
                prompt(1, 2, 3),
                num_samples=1,
                sampling_params=types.SamplingParams(max_tokens=2, temperature=0.0),
                include_prompt_logprobs=True,
                topk_prompt_logprobs=3,
                topk_sample_logprobs=3,
            )
            .result()
        )
        likeliest = topk.sequences[0].topk_logprobs
        assert [one[0][0] for one in likeliest] == topk.sequences[0].tokens
        assert [one[0][1] for one in likeliest] == topk.sequences[0].logprobs
        assert [len(one or ()) for one in topk.topk_prompt_logprobs] == [0, 3, 3]

        state = small.save_state("kept").result().path
        sampler = small.save_weights_for_sampler("kept").result().path
        expected = trained_logprobs(small, 1, 2, 3, 4, 5)
        small.forward_backward([datum(1, 2, 3)] * 50, "cross_entropy")
        small.optim_step(types.AdamParams())
        process.kill()
        process.wait(60)
    with serving(model, tmp_path) as (address, _):
        client = tinker.ServiceClient(**address)
        resumed = client.create_training_client_from_state_with_optimizer(state).result()
        assert torch.equal(
            torch.tensor(trained_logprobs(resumed, 1, 2, 3, 4, 5)), torch.tensor(expected)
        )
        kept = client.create_sampling_client(model_path=sampler).result()
        values = kept.compute_logprobs(prompt(1, 2, 3, 4, 5)).result()
        assert values[1:] == pytest.approx(expected, abs=CLOSE)
        check_chat(address, sampler)
        client.close("success").result(60)
    run, _, checkpoint = sampler.removeprefix("tinker://").partition("/")
    merged = tmp_path / "merged"
    assert main(["export", str(tmp_path / "runs" / run / checkpoint), str(merged), *MODEL]) == 0
    with serving(merged, tmp_path / "other") as (address, _):
        client = tinker.ServiceClient(**address)
        base = client.create_sampling_client(base_model=str(merged)).result()
        values = base.compute_logprobs(prompt(1, 2, 3, 4, 5)).result()
        assert values[1:] == pytest.approx(expected, abs=CLOSE)
        client.close("success").result(60)


def test_a_mixture_has_adapters_on_its_attention(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a patch vLLM's engine dies at the first request, with adapters or without."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = tmp_path / "model"
    tiny_tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(model)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    tokens = (1, 2, 3, 4, 5, 60, 70, 80)
    with serving(model, tmp_path) as (address, _):
        client = tinker.ServiceClient(**address)
        trained = client.create_lora_training_client(
            str(model), rank=8, seed=1, train_unembed=False
        ).result()
        base = client.create_sampling_client(base_model=str(model)).result()
        before = base.compute_logprobs(prompt(*tokens)).result()[1:]
        assert before == pytest.approx(trained_logprobs(trained, *tokens), abs=CLOSE)
        for _ in range(3):
            train(trained, *tokens)
        sampler = trained.save_weights_and_get_sampling_client().result()
        after = sampler.compute_logprobs(prompt(*tokens)).result()[1:]
        assert after == pytest.approx(trained_logprobs(trained, *tokens), abs=CLOSE)
        assert max(abs(a - b) for a, b in zip(after, before, strict=True)) > 100 * CLOSE
        client.close("success").result(60)


def check_chat(address: dict[str, str], model: str) -> None:
    """Check the chat API: a stop string ends the text of a greedy answer before itself."""
    url = f"{address['base_url']}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {address['api_key']}"}
    question = [{"role": "user", "content": "Which?"}]

    def ask(**options: Any) -> Any:
        body = {"model": model, "messages": question, "temperature": 0, "max_tokens": 12}
        answer = httpx.post(url, json={**body, **options}, headers=headers, timeout=60)
        return answer.json()["choices"][0]

    full = ask()
    text = full["message"]["content"]
    assert len(text) > 2 and ask() == full
    stopped = ask(stop=[text[2]])
    assert stopped["message"]["content"] == text[: text.index(text[2])]
    assert stopped["finish_reason"] == "stop"
