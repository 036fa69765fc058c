"""A Tinker server in a thread of this process, which samples by transformers and PEFT."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_fast.config import as_config
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.tinker.sampling import SampleCall, Snapshot
from skyrl_fast.tinker.service import TinkerService
from skyrl_fast.tinker.start import TinkerOptions, make_service, serving
from skyrl_fast.tinker.training import AdapterTrainer, TrainedAdapter
from skyrl_fast.tinker.wire import Datum, ForwardBackward, SampledTokens, Samples
from skyrl_fast.train.model.policy import Policy

KEY = "tml-" + "k" * 32


def load_adapted(model: Path, adapter: Path | None, dtype: torch.dtype = torch.float32) -> Any:
    """Return a transformers model with PEFT's own layers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    if adapter is None:
        return base.eval()
    # By default PEFT computes adapters in float32.
    return PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False).eval()


@dataclass
class TorchSampler:
    """Samples with transformers; a snapshot that is not the last one is loaded from its folder.

    So it is as if all others had been evicted.
    """

    model: Path
    end_token: int
    _loaded: dict[Path | None, Any] = field(default_factory=dict)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def sample(self, call: SampleCall, snapshot: Snapshot | None, space: str) -> Samples:
        return self._sample(call, None if snapshot is None else snapshot.folder)

    def _sample(self, call: SampleCall, folder: Path | None) -> Samples:
        if folder not in self._loaded:
            self._loaded = {folder: load_adapted(self.model, folder)}
        model = self._loaded[folder]
        random = torch.Generator().manual_seed(call.seed or 0)
        rows = torch.tensor([call.prompt] * call.num_samples)
        values = []
        with torch.no_grad():
            logprobs = model(rows[:1]).logits[0].log_softmax(-1)
            for _ in range(call.max_tokens):
                logits = model(rows).logits[:, -1]
                if call.temperature:
                    probabilities = (logits / call.temperature).softmax(-1)
                    tokens = torch.multinomial(probabilities, 1, generator=random)
                else:
                    tokens = logits.argmax(-1, keepdim=True)
                values.append(logits.log_softmax(-1).gather(1, tokens)[:, 0])
                rows = torch.cat((rows, tokens), dim=1)
        of_prompt = np.full(len(call.prompt), np.nan, np.float32)
        for place, token in enumerate(call.prompt[1:], 1):
            of_prompt[place] = logprobs[place - 1, token]
        answers = rows[:, len(call.prompt) :].tolist()
        chosen = torch.stack(values, dim=1).tolist()
        sequences = [self._cut(call, *one) for one in zip(answers, chosen, strict=True)]
        return Samples(sequences, of_prompt if call.prompt_logprobs else None)

    def _cut(self, call: SampleCall, tokens: list[int], logprobs: list[float]) -> SampledTokens:
        """Return an answer up to the first token that stops it."""
        stops = set(call.stop_ids) if call.ignores_end else {self.end_token, *call.stop_ids}
        for place, token in enumerate(tokens, 1):
            if token in stops:
                return SampledTokens(tokens[:place], logprobs[:place], stopped=True)
        return SampledTokens(tokens, logprobs, stopped=False)


@dataclass
class RunningServer:
    """A server that answers at `url`."""

    url: str
    service: TinkerService
    loop: asyncio.AbstractEventLoop

    def run(self, work: Any) -> Any:
        """Return the result of a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


def make_tiny_service(
    model: Path, folder: Path, sampler: TorchSampler, **options: Any
) -> TinkerService:
    """Return the service of a model that is sampled by transformers."""
    config = as_config({"trainer.policy.model.path": str(model)})
    config.trainer.policy.model.lora.alpha = 32
    config.generator.sampling_params.temperature = 1.0
    return make_service(config, TinkerOptions(folder=folder, **options), sampler)


@contextmanager
def running_server(
    model: Path, folder: Path, end_token: int = 0, **options: Any
) -> Iterator[RunningServer]:
    """Serve a model in another thread."""
    service = make_tiny_service(model, folder, TorchSampler(model, end_token), **options)
    started = threading.Event()
    stop = asyncio.Event()
    found: list[RunningServer] = []

    async def serve() -> None:
        async with serving(service, KEY) as url:
            found.append(RunningServer(url, service, asyncio.get_running_loop()))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield found[0]
    finally:
        found[0].loop.call_soon_threadsafe(stop.set)
        thread.join(60)


def make_trainer(
    model: Path, dtype: torch.dtype = torch.float64, *, tree: bool = True, max_rank: int = 32
) -> AdapterTrainer:
    """Return a trainer of adapters without a server."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).requires_grad_(False)
    policy = Policy(base, tree=tree)
    lora = LoraConfig(alpha=32)
    return AdapterTrainer(policy, str(model), lora, max_rank=max_rank, max_length=512)


def randomize(adapter: TrainedAdapter, seed: int) -> None:
    """Give an adapter's matrices random values: of a new one B is 0, and A has no gradient."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            # PEFT's new matrices are float32; of a float64 model they are float64 here, too.
            parameter.data = parameter.data.to(adapter.policy.model.dtype)
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))


def matrices(adapter: TrainedAdapter) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in adapter.parameters()]


def make_datum(
    random: np.random.Generator, length: int, prefix: Any = (), *, width: int | None = None
) -> Datum:
    """Return a datum of random tokens and targets, with random weights of any sign."""
    tokens = np.append(np.array(prefix, np.int32), random.integers(0, 200, length, np.int32))
    shape = (len(tokens),) if width is None else (len(tokens), width)
    targets = random.integers(0, 200, shape, np.int64)
    weights = random.normal(size=shape).astype(np.float32)
    return Datum(tokens.astype(np.int32), {"target_tokens": targets, "weights": weights})


def call_of(datums: Any, loss: str = "cross_entropy", **options: Any) -> ForwardBackward:
    forward_only = options.pop("forward_only", False)
    return ForwardBackward("model", 1, loss, options, list(datums), forward_only)


# --- a client of the SDK

RATE = 1e-2


def new_model(client: Any, model: Path | str, rank: int = 8, seed: int = 1) -> Any:
    """Return a training client."""
    return client.create_lora_training_client(
        base_model=str(model), rank=rank, seed=seed, train_unembed=False
    ).result()


def datum(*tokens: int, weights: Any = None, **inputs: Any) -> Any:
    """Return the SDK's datum of a sequence, by default with weights of 1."""
    from tinker import types

    if not inputs:
        inputs = {"weights": np.ones(len(tokens) - 1, np.float32) if weights is None else weights}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **inputs},
    )


def train(model: Any, steps: int, *tokens: int) -> torch.Tensor:
    """Take steps on one sequence; return its log-probabilities before the last one."""
    from tinker import types

    for _ in range(steps):
        future = model.forward_backward([datum(*tokens)], "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=RATE)).result()
    values: torch.Tensor = future.result().loss_fn_outputs[0]["logprobs"].to_torch()
    return values
