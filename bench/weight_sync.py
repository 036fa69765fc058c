"""Weight updates of engine servers: seconds and bytes, by a gloo broadcast and by a file.

    python -m bench.weight_sync [--models 0.4M 26M 135M] [--engines 1 2] [--rounds 5]

Servers of `skyrl-fast engine` on this machine, with float32 weights and real vLLM. Each update is
verified on each engine, as in a run: digests, parameters without new values, and a probe's
log-probabilities. Seconds are from the first byte to the last engine's answer, without the probe,
of which the column `probe` has the median. CPU seconds are medians of an update with its probe: of
this process, and of all engines. With `--ranks 2` so many processes share the weights by FSDP2; the
CPU seconds are those of rank 0.
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
from functools import partial
from pathlib import Path

import psutil
import torch

from bench._tokenizer import byte_level_tokenizer
from skyrl_fast.config import InferenceEngineConfig
from skyrl_fast.rollout.engine.pool import EnginePool
from skyrl_fast.rollout.engine.protocol import Engine
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.serve_vllm import serve_command, serve_environment
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.probe import WeightProbe
from skyrl_fast.rollout.engine.weights.transfer import Transport
from skyrl_fast.rollout.engine.weights.transports.broadcast import send_by_broadcast
from skyrl_fast.rollout.engine.weights.transports.file import send_by_file
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.local_ranks import LocalRanks
from skyrl_fast.train.parallel.rank_processes import start_ranks
from skyrl_fast.train.parallel.ranks import Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import local_tensor

HOST = "127.0.0.1"
KEY = "k" * 32
PROBE = [list(range(5, 53))]
# layers, width, vocabulary: of the quickstart, of design 020, of SmolLM2-135M
SHAPES = {"0.4M": (2, 128, 512), "26M": (8, 512, 4096), "135M": (30, 576, 49_152)}
TRANSPORTS: dict[str, tuple[str, Transport]] = {
    "gloo": ("gloo", send_by_broadcast),
    "file": ("file", send_by_file),
}


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--engines", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--by", nargs="*", choices=TRANSPORTS, default=["gloo", "file"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| parameters | ranks | engines | by | MB for each | seconds | least, most | probe "
        "| CPU: trainer | engines |\n" + "|---" * 10 + "|"
    )
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            create(Path(folder), *SHAPES[name])
            make_policy = partial(policy_of, folder, options.dtype)
            starter = LocalRanks(Path(folder))
            ranks = stack.enter_context(
                start_ranks(options.ranks, make_policy, cuda=False, starter=starter)
            )
            policy = make_policy(ranks)
            numbers = range(max(options.engines))
            servers = [
                stack.enter_context(server(Path(folder), number, options.dtype))
                for number in numbers
            ]
            for number in options.engines:
                for by in options.by:
                    row = asyncio.run(measured(policy, servers[:number], by, options.rounds))
                    millions = sum(p.numel() for p in policy.model.parameters()) / 1e6
                    print(
                        f"| {millions:.1f} M | {options.ranks} | {number} | {by} | {row} |",
                        flush=True,
                    )


def create(folder: Path, layers: int, width: int, vocabulary: int) -> None:
    """Write a random Llama into the folder, with a tokenizer."""
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
    LlamaForCausalLM(config).save_pretrained(folder)


def policy_of(folder: str, dtype: str, ranks: Ranks) -> Policy:
    """Return the policy of a model's folder, sharded over the ranks.

    Args:
        dtype: of its passes.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Policy(model, ranks=ranks, dtype=getattr(torch, dtype))


@run_on_all_ranks
def change(policy: Policy) -> None:
    """Change all weights by a thousandth of each."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            local_tensor(parameter).mul_(1.001)


@contextmanager
def server(model: Path, number: int, dtype: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server; yield its address and its process."""
    engine = InferenceEngineConfig(num_threads=1, model_dtype=dtype)
    setup = VllmSetup(str(model), engine, max_model_len=128)
    port = 8900 + number
    with (model / f"server_{number}.log").open("wb") as log:
        process = subprocess.Popen(
            serve_command(setup, host=HOST, port=port),
            stdout=log,
            stderr=log,
            env=serve_environment(setup, os.environ, key=KEY, trainer=HOST),
        )
    try:
        yield f"http://{HOST}:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


async def measured(
    policy: Policy,
    servers: Sequence[tuple[str, psutil.Process]],
    by: str,
    rounds: int,
) -> str:
    """Return bytes, seconds, and the probe's and CPU seconds of verified updates of servers."""
    way, transport = TRANSPORTS[by]
    engines = [RemoteEngine(url, api_key=KEY, weight_sync=way, trainer=HOST) for url, _ in servers]
    pool = EnginePool(engines, transport=transport)
    await pool.start()
    reports, seconds = [], []
    try:
        for _ in range(rounds + 1):
            change(policy)
            cpu, before = time.process_time(), engine_cpu_seconds(servers)
            started = time.perf_counter()
            worst = await pool.update(
                policy.named_weights(pool.weights_dtype), partial(probe_of, policy)
            )
            taken = time.perf_counter() - started
            cpu, after = time.process_time() - cpu, engine_cpu_seconds(servers)
            probe = max(report.verify_seconds for report in pool.reports.values())
            reports.append(worst)
            seconds.append((taken - probe, probe, cpu, after - before))
    finally:
        await pool.close()
    times, *others = zip(*seconds[1:], strict=True)  # the first one allocates
    return (
        f"{reports[-1].num_bytes / 1e6:.1f} | {statistics.median(times):.3f} | "
        f"{min(times):.3f}, {max(times):.3f} | "
        + " | ".join(f"{statistics.median(values):.3f}" for values in others)
    )


def engine_cpu_seconds(servers: Sequence[tuple[str, psutil.Process]]) -> float:
    """Return the CPU seconds that the servers' processes have used."""
    processes = [one for _, top in servers for one in (top, *top.children(recursive=True))]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def probe_of(policy: Policy, engine: Engine) -> WeightProbe:
    """Return the comparison of an engine with the policy."""
    return WeightProbe(
        engine,
        probe=PROBE,
        trainer_logprobs=policy.sequence_logprobs,
        dtype=policy.dtype,
    )


if __name__ == "__main__":
    main()
