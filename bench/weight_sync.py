"""Weight updates of engine servers: seconds and bytes, by a gloo broadcast and by a file.

    python -m bench.weight_sync [--models 0.4M 26M 135M] [--engines 1 2] [--rounds 5]

Servers of `skyrl-fast engine` on this machine, with float32 weights and real vLLM. Each update is
verified on each engine, as in a run: digests, parameters without new values, and a probe's
log-probabilities. Seconds are from the first byte to the last engine's answer, without the probe,
of which the column `probe` has the median.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bench._tokenizer import byte_level_tokenizer
from skyrl_fast.config import InferenceEngineConfig
from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.protocol import Engine
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.serve_vllm import serve_command, serve_environment
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.sync import Logprobs, WeightSync
from skyrl_fast.rollout.engine.weights.transfer import WeightTransfer, by_broadcast, by_file

HOST = "127.0.0.1"
KEY = "k" * 32
PROBE = [list(range(5, 53))]
# layers, width, vocabulary: of the quickstart, of design 020, of SmolLM2-135M
SHAPES = {"0.4M": (2, 128, 512), "26M": (8, 512, 4096), "135M": (30, 576, 49_152)}
TRANSFERS: dict[str, WeightTransfer] = {"gloo": by_broadcast, "file": by_file()}


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--engines", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| parameters | engines | by | MB for each | seconds | least, most | probe |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            model = create(Path(folder), *SHAPES[name])
            servers = range(max(options.engines))
            urls = [stack.enter_context(server(Path(folder), number)) for number in servers]
            for number in options.engines:
                for by in TRANSFERS:
                    row = asyncio.run(measured(model, urls[:number], by, options.rounds))
                    millions = sum(p.numel() for p in model.parameters()) / 1e6
                    print(f"| {millions:.1f} M | {number} | {by} | {row} |", flush=True)


def create(folder: Path, layers: int, width: int, vocabulary: int) -> Any:
    """Return a random Llama, written into the folder with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    byte_level_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@contextmanager
def server(model: Path, number: int) -> Iterator[str]:
    """Start a server; yield its address."""
    setup = VllmSetup(str(model), InferenceEngineConfig(num_threads=1), max_model_len=128)
    port = 8900 + number
    with (model / f"server_{number}.log").open("wb") as log:
        process = subprocess.Popen(
            serve_command(setup, host=HOST, port=port),
            stdout=log,
            stderr=log,
            env=serve_environment(setup, os.environ, key=KEY, trainer=HOST),
        )
    try:
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait()


async def measured(model: Any, urls: Sequence[str], by: str, rounds: int) -> str:
    """Return bytes, seconds and the probe's seconds of verified updates of these servers."""
    engines = [RemoteEngine(url, api_key=KEY, weight_sync=by, trainer=HOST) for url in urls]
    pool = EnginePool(engines, transfer=TRANSFERS[by])
    await pool.start()
    reports, seconds = [], []
    try:
        for _ in range(rounds + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            started = time.perf_counter()
            worst = await pool.update(
                dict(model.named_parameters()), lambda engine: sync_of(engine, model)
            )
            taken = time.perf_counter() - started
            probe = max(report.verify_seconds for report in pool.reports.values())
            reports.append(worst)
            seconds.append((taken - probe, probe))
    finally:
        await pool.close()
    times = [one for one, _ in seconds[1:]]  # the first one allocates
    probes = statistics.median(probe for _, probe in seconds[1:])
    return (
        f"{reports[0].num_bytes / 1e6:.1f} | {statistics.median(times):.3f} | "
        f"{min(times):.3f}, {max(times):.3f} | {probes:.3f}"
    )


def sync_of(engine: Engine, model: Any) -> WeightSync:
    """Return the comparison of an engine with the model."""

    @torch.no_grad()
    def logprobs(probe: list[list[int]]) -> Logprobs:
        found = []
        for ids in probe:
            row = torch.tensor([ids])
            logits = model(row).logits[0, :-1].float()
            values = logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
            found.append((values.tolist(), float(logits.std())))
        return found

    return WeightSync(engine, probe=PROBE, trainer_logprobs=logprobs)


if __name__ == "__main__":
    main()
