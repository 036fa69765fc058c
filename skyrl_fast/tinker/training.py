"""Training of adapters on one frozen model: what the calls of a training client compute.

Each model of the SDK is an adapter with an optimizer of its own. Gradients add up over calls until
`optim_step`; a call that fails leaves them as they were. All calls run in one thread.

A target positions of a request, M of a pass, K targets of a position.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_fast.config.settings import LoraConfig, OptimizerConfig
from skyrl_fast.rollout.engine.model_layers import linear_modules
from skyrl_fast.tinker.datums import batch_of_datums, check_datums, with_targets
from skyrl_fast.tinker.losses import LossInputs, TokenLoss, find_loss, gather_inputs
from skyrl_fast.tinker.wire import Datum, ForwardBackward, LossOutputs, RefusedCallError
from skyrl_fast.train.model.forward_pass import MicroBatch, response_positions
from skyrl_fast.train.model.lora import NAME
from skyrl_fast.train.model.optimizer import Optimizer, StepNumbers
from skyrl_fast.train.model.policy import Policy

ATTENTION = re.compile(r"attn|attention")  # in the path of a module inside a layer
LOSS_SUM = "loss:sum"  # the client reads it
ROW_TOKENS = "row_tokens:sum"
FORWARD_TOKENS = "forward_tokens:sum"
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """What a client chooses of its adapter."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True


@dataclass(slots=True)
class TrainedAdapter:
    """An adapter and its optimizer.

    Args:
        name: of the adapter in the model.
        num_steps: optimizer steps so far, of a loaded one those before it too.
    """

    name: str
    form: AdapterForm
    policy: Policy
    optimizer: Optimizer
    num_steps: int = 0

    def parameters(self) -> list[torch.Tensor]:
        return [value for _, value in self.policy.trained_parameters()]


@dataclass(frozen=True, slots=True)
class _SavedNames:
    """A policy whose parameters have the names of a saved adapter, for its optimizer."""

    policy: Policy

    @property
    def ranks(self) -> Any:
        return self.policy.ranks

    def trained_parameters(self) -> list[tuple[str, torch.Tensor]]:
        # An optimizer's file names parameters, and is loaded into an adapter of another name.
        named = self.policy.trained_parameters()
        return [(name.replace(f".{self.policy.adapter}.", f".{NAME}."), p) for name, p in named]


class AdapterTrainer:
    """Adds, trains, saves and loads adapters of one model.

    Args:
        base: the frozen model.
        path: its folder or hub name, for the adapters' files.
        lora: settings that all adapters share: alpha, excluded modules, initial values.
        max_rank: the largest rank.
        max_length: the most input tokens of a datum.
    """

    def __init__(
        self,
        base: Policy,
        path: str,
        lora: LoraConfig,
        *,
        max_rank: int,
        max_length: int,
    ) -> None:
        self.max_rank = max_rank
        self.max_length = max_length
        self.vocab_size = base.head.module.weight.shape[0]
        self.base = base
        self._path = path
        self._lora = lora
        self._modules = _modules_by_kind(base.model)
        self._numbers = itertools.count()

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The last parts of the names of all modules that may have an adapter."""
        paths = [path for paths in self._modules.values() for path in paths]
        return tuple(sorted({path.rpartition(".")[2] for path in paths}))

    def check_form(self, form: AdapterForm) -> None:
        """Raise RefusedCallError for an adapter that cannot be trained."""
        if not 1 <= form.rank <= self.max_rank:
            raise RefusedCallError(
                f"lora_config.rank: expected 1 to {self.max_rank} (--max-rank), got {form.rank}"
            )
        if not form.train_attn and not form.train_mlp:
            raise RefusedCallError(
                "lora_config: expected train_attn or train_mlp, got neither: adapters on the head "
                "(train_unembed) are not served"
            )

    def create(self, form: AdapterForm, *, seed: int | None = None) -> TrainedAdapter:
        """Return a new adapter, whose initial values depend on the seed; None: a random one.

        Raises:
            RefusedCallError: it cannot be trained on this model.
        """
        self.check_form(form)
        with torch.random.fork_rng(devices=[]):
            if seed is None:
                torch.seed()
            else:
                torch.manual_seed(seed % MAX_SEED)
            return self._add(form, None)

    def load(self, form: AdapterForm, folder: Path, *, optimizer: bool) -> TrainedAdapter:
        """Return a saved adapter, with its optimizer's moments or with new ones."""
        self.check_form(form)
        loaded = self._add(form, folder)
        if optimizer:
            loaded.optimizer.load(folder)
            loaded.num_steps = loaded.optimizer.step_count
        return loaded

    def load_into(self, adapter: TrainedAdapter, folder: Path, *, optimizer: bool) -> None:
        """Replace an adapter's matrices by saved ones of the same form, and the optimizer.

        Pending gradients are dropped.
        """
        loaded = self.load(adapter.form, folder, optimizer=optimizer)
        self.remove(adapter)
        for name in ("name", "policy", "optimizer", "num_steps"):
            setattr(adapter, name, getattr(loaded, name))

    def _add(self, form: AdapterForm, folder: Path | None) -> TrainedAdapter:
        name = f"model_{next(self._numbers)}"
        lora = replace(self._lora, rank=form.rank, path=None, policies=[])
        if not (form.train_attn and form.train_mlp):
            lora.target_modules = self._modules["attn" if form.train_attn else "mlp"]
        try:
            policy = self.base.add_adapter(name, lora, base=self._path, folder=folder)
        except ValueError as error:
            raise RefusedCallError(f"lora_config: {error}") from error
        optimizer = Optimizer(_SavedNames(policy), OptimizerConfig(), total_steps=0)
        return TrainedAdapter(name, form, policy, optimizer)

    def remove(self, adapter: TrainedAdapter) -> None:
        """Free an adapter, its gradients and its optimizer."""
        self.base.remove_adapter(adapter.name)

    def forward_backward(self, adapter: TrainedAdapter, call: ForwardBackward) -> LossOutputs:
        """Add the gradient of the sum of losses; return the log-probabilities of all targets.

        Raises:
            RefusedCallError: a datum, loss or option that is not served; nothing has changed.
        """
        loss = find_loss(call.loss)
        check_datums(call.datums, vocab_size=self.vocab_size, max_length=self.max_length)
        outputs: list[LossOutputs] = []
        with _gradients_kept(adapter.parameters(), enabled=not call.forward_only):
            # Those of equally many targets share their passes.
            for _, group in groupby(call.datums, key=lambda datum: _width(datum)):
                datums = list(group)
                values = gather_inputs(call.loss, loss, datums, call.options)
                outputs.append(
                    self._run(adapter, datums, loss, values, backward=not call.forward_only)
                )
        logprobs = [array for one in outputs for array in one.logprobs]
        names = outputs[0].metrics
        metrics = {name: math.fsum(one.metrics[name] for one in outputs) for name in names}
        return LossOutputs(logprobs, metrics)

    def _run(
        self,
        adapter: TrainedAdapter,
        datums: Sequence[Datum],
        loss: TokenLoss,
        values: Mapping[str, torch.Tensor],
        *,
        backward: bool,
    ) -> LossOutputs:
        batch = batch_of_datums(datums)
        targets = torch.from_numpy(
            np.concatenate([datum.inputs["target_tokens"] for datum in datums]).astype(np.int64)
        )
        owners = torch.repeat_interleave(batch.response_lengths.long())
        passes = adapter.policy.passes(batch)
        logprobs = torch.zeros(targets.shape)
        losses = []
        for micro in passes:
            places = response_positions(batch, micro)
            computed = self._logprobs(adapter.policy, micro, targets[places], backward=backward)
            given = LossInputs(_at(values, places, computed), owners[places])
            total = loss.compute(computed, given).sum()
            if backward:
                total.backward()
            losses.append(float(total.detach()))
            logprobs[places] = computed.detach().to(logprobs)
        lengths = batch.response_lengths.tolist()
        metrics = {
            LOSS_SUM: math.fsum(losses),
            ROW_TOKENS: float(sum(lengths)),
            FORWARD_TOKENS: float(passes.num_tokens.sum()),
        }
        return LossOutputs([one.numpy() for one in logprobs.split(lengths)], metrics)

    def _logprobs(
        self, policy: Policy, micro: MicroBatch, targets: torch.Tensor, *, backward: bool
    ) -> torch.Tensor:
        """Return (M,) or (M, K) log-probabilities of a pass's targets."""
        with torch.set_grad_enabled(backward):
            if targets.dim() > 1:
                return policy.gathered_logprobs(micro, targets)
            values, _ = policy.logprobs(with_targets(micro, targets, self.vocab_size))
        return values

    def optim_step(self, adapter: TrainedAdapter, numbers: StepNumbers) -> dict[str, float]:
        """Take one step of AdamW with these numbers, and clear the gradients.

        Without a gradient nothing changes.
        """
        measured = adapter.optimizer.step(numbers)
        adapter.num_steps += 1
        return {"grad_norm": measured["policy/grad_norm"], "lr": measured["policy/lr"]}

    def save(self, adapter: TrainedAdapter, folder: Path, *, optimizer: bool) -> None:
        """Write PEFT's files of an adapter, and its optimizer's moments; no gradients."""
        adapter.policy.save_adapter(adapter.name, folder)
        if optimizer:
            adapter.optimizer.save(folder)


def _width(datum: Datum) -> tuple[int, ...]:
    return datum.inputs["target_tokens"].shape[1:]


def _at(
    values: Mapping[str, torch.Tensor], places: torch.Tensor, like: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the values of a pass's tokens, in the dtype and on the device of `like`."""
    chosen = {}
    for name, value in values.items():
        of_pass = value[places] if value.dim() else value
        chosen[name] = of_pass.to(like)
    return chosen


@contextmanager
def _gradients_kept(parameters: Sequence[torch.Tensor], *, enabled: bool) -> Iterator[None]:
    """Add the gradients of the block to those before it; an error leaves these as they were."""
    before = [parameter.grad for parameter in parameters]
    if enabled:
        for parameter in parameters:
            parameter.grad = None
    done = False
    try:
        yield
        done = True
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            new = parameter.grad if done and enabled else None
            if old is not None and new is not None:
                new += old
            parameter.grad = old if new is None else new


def _modules_by_kind(model: Any) -> dict[str, list[str]]:
    """Return the linear modules of the layers by kind, attn or mlp, as PEFT's target modules."""
    kinds: dict[str, list[str]] = {"attn": [], "mlp": []}
    for layer, path in linear_modules(model):
        kind = "attn" if ATTENTION.search(path) else "mlp"
        kinds[kind].append(f"{layer}.{path}")
    return {kind: list(dict.fromkeys(names)) for kind, names in kinds.items()}
