"""The critic of GAE: a transformer with a linear head that estimates the value before each token.

It has its own optimizer and is trained on every batch. With LoRA it may be another adapter of the
policy's frozen base, next to its head. A response tokens of a batch, M trained
tokens of a micro-batch, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from skyrl_fast.batch import StepBatch
from skyrl_fast.config import Config, OptimizerConfig
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.ops import _backend
from skyrl_fast.train.data.schedule import total_optimizer_steps
from skyrl_fast.train.metrics.aggregate import Part, add_up_mini_batches
from skyrl_fast.train.model.lm_head import backbone as backbone_of
from skyrl_fast.train.model.loading import load_model, recomputes_activations
from skyrl_fast.train.model.lora import (
    CRITIC,
    adapters_of,
    add_adapter,
    use_adapter,
)
from skyrl_fast.train.model.micro_batch import (
    MicroBatch,
    MicroBatches,
    response_positions,
)
from skyrl_fast.train.model.optimizer import Optimizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.model.random_passes import refuse_random_passes
from skyrl_fast.train.model.residual_stream import round_residual_stream
from skyrl_fast.train.model.row_layout import (
    uses_trees,
)
from skyrl_fast.train.model.trained_model import TokenValues, TrainedModel, per_token
from skyrl_fast.train.model.tree_forward import padded_trees
from skyrl_fast.train.parallel.per_rank import PerRank
from skyrl_fast.train.parallel.rank_shares import Share
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import (
    VALUE_HEAD,
    full_weight,
    gathered_outside_layers,
    reduce_at_last,
    with_full_params,
)
from skyrl_fast.train.parallel.stored_weights import device_of
from skyrl_fast.train.parallel.traffic import CHECKPOINT

HEAD_FILE = "value_head.safetensors"


class ValueModel(torch.nn.Module):
    """A transformers backbone and a linear map of its last hidden states to one number.

    Args:
        backbone: transformers model without LM head; returns `last_hidden_state`.
        folder: where the map's weight may be stored; None: a new one.
    """

    def __init__(self, backbone: Any, folder: Path | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        shared = getattr(backbone, VALUE_HEAD, None)
        if shared is None:
            self.value_head = make_value_head(backbone, folder, device_of(backbone))
        else:
            self.value_head = shared

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return (n, L) values of (n, L) sequences: of the state after each token."""
        return self.head(self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (...) values of (..., H) last hidden states."""
        weight = self.value_head.weight
        return torch.nn.functional.linear(hidden.to(weight.dtype), weight)[..., 0]


def make_value_head(backbone: Any, folder: Path | None, device: torch.device) -> torch.nn.Linear:
    """Return the map from hidden states to a value: that of the folder, if it has one, or new."""
    size = backbone.config.hidden_size
    # The frozen base of an adapter may have 16 bits, too few for small steps.
    dtype = torch.promote_types(backbone.dtype, torch.float32)
    head = torch.nn.Linear(size, 1, bias=False, device=device, dtype=dtype)
    torch.nn.init.normal_(head.weight, std=1 / (size + 1))  # SkyRL's
    if folder is not None and (folder / HEAD_FILE).is_file():
        with torch.no_grad():
            head.weight.copy_(load_file(str(folder / HEAD_FILE))["weight"])
    return head


def add_to_base(model: Any, lora: LoraConfig, *, base: str, folder: Path | None = None) -> None:
    """Add a critic's adapter and value head to a policy's model that has an adapter, in place.

    Args:
        lora: settings of the adapter, as of the policy's.
        base: folder or hub name of the model, for the adapter's files.
        folder: of a critic that training continues from; None: a new one.
    """
    (of_policy,) = adapters_of(model)
    add_adapter(model, lora, base=base, folder=folder, name=CRITIC)
    use_adapter(model, of_policy)
    # In the model, so that ranks share it like the other weights.
    owner = backbone_of(model)
    owner.add_module(VALUE_HEAD, make_value_head(owner, folder, device_of(model)))


_STEP = ("critic_loss", "values_mean", "values_clipfrac")


class Critic(TrainedModel):
    """Value model with its optimizer: values of trained tokens, and training on returns.

    Args:
        model: float32 weights.
        total_steps: optimizer steps of the full run, for decaying schedules.
        value_clip: see `value_loss`.
        max_tokens_per_microbatch: most padded tokens of one forward pass.
        tree: process rows as prefix trees; None: see `Policy`.
        policy: whose base, rows and ranks it shares: its model has had `add_to_base`, and `model`
            is of its backbone. None: the model is the critic's own.

    Raises:
        ValueError: the model does not support trees.
    """

    def __init__(
        self,
        model: ValueModel,
        optimizer_config: OptimizerConfig,
        *,
        total_steps: int,
        mini_batch_size: int,
        update_epochs: int = 1,
        value_clip: float | None = None,
        max_tokens_per_microbatch: int = 16384,
        dtype: torch.dtype = torch.float32,
        tree: bool | None = False,
        ranks: Ranks = SINGLE_RANK,
        policy: Policy | None = None,
    ) -> None:
        super().__init__(
            model if policy is None else policy.root,
            pretrained=model.backbone,
            backbone=model.backbone,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            dtype=dtype,
            ranks=ranks,
            adapter=None if policy is None else CRITIC,
        )
        self.model = model
        if policy is None:
            self.distribute()
            with gathered_outside_layers(model):
                refuse_random_passes(model.backbone, self.autocast)
            self.choose_layout(tree)
        else:
            self.share(policy)
        self.optimizer = Optimizer(self, optimizer_config, total_steps=total_steps)
        self.mini_batch_size = mini_batch_size
        self.update_epochs = update_epochs
        self.value_clip = value_clip

    def values(self, micro: MicroBatch) -> torch.Tensor:
        """Return (M,) float32, the values of the states in which the tokens were sampled."""
        micro = padded_trees(micro, self.device, self.ranks.sequence)
        self.use_adapter()

        def values_of() -> torch.Tensor:
            with self.autocast():
                return self.model.head(self.hidden_states(micro))

        values = with_full_params(self.root, values_of)
        values = values.index_select(0, _backend.to_device_of(micro.hidden_index, values)).float()
        return micro.joined(values)

    def batch_values(self, batch: StepBatch) -> torch.Tensor:
        """Return (A,) float32 values of the trained tokens, without gradients; 0 elsewhere."""
        return per_token(batch, self._values_of_share(self.shares(batch)))

    @run_on_all_ranks
    def _values_of_share(self, shares: PerRank[Share]) -> list[TokenValues]:
        return self.values_of_share(shares.here, self.values)

    def plan(self, batch: StepBatch, token_budget: int, **options: Any) -> MicroBatches:
        # The environment's tokens are trained by the policy alone.
        return super().plan(batch.with_(cross_entropy_weights=None), token_budget, **options)

    def update(self, batch: StepBatch) -> dict[str, float]:
        """Take optimizer steps towards the batch's returns; return their mean metrics."""
        minis = batch.mini_batches(self.mini_batch_size)
        steps = []
        for _ in range(self.update_epochs):
            for mini in minis:
                tokens = int((mini.loss_mask != 0).sum())
                steps.append(Part(self._step(mini), tokens=tokens))
        metrics = add_up_mini_batches(steps)
        metrics["critic/optimizer_steps"] = float(len(steps))
        trained = batch.loss_mask != 0
        assert batch.values is not None and batch.returns is not None
        metrics["critic/explained_variance"] = explained_variance(
            batch.values[trained], batch.returns[trained]
        )
        return metrics

    def owns(self, name: str) -> bool:
        # The head of a critic on the policy's base is a module of that base.
        return super().owns(name) or f".{VALUE_HEAD}." in name

    def save(self, folder: Path) -> None:
        """Write backbone (Hugging Face format) or adapter (PEFT's), head and optimizer.

        Several ranks queue the weights and moments in `ranks.files`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"weight": self._head_weight()}, str(folder / HEAD_FILE))
        if self.adapter is not None:
            self.save_adapter(self.adapter, folder)
        else:
            self.save_weights(folder)
        self.optimizer.save(folder)

    def restore(self, folder: Path) -> None:
        """Read the optimizer's state; the weights were loaded from the folder already."""
        self.optimizer.load(folder)

    @run_on_all_ranks
    def _head_weight(self) -> torch.Tensor:
        return full_weight(self.model.value_head.weight, self.ranks, CHECKPOINT, self.idle).cpu()

    def _step(self, batch: StepBatch) -> dict[str, float]:
        self.optimizer.zero_grad()
        results = self.accumulate_gradient(batch)
        sums = {name: sum(result[name] for result in results) for name in _STEP}
        step = {name.removeprefix("policy/"): v for name, v in self.optimizer.step().items()}
        return {f"critic/{name}": value for name, value in (sums | step).items()}

    def accumulate_gradient(self, batch: StepBatch) -> list[dict[str, float]]:
        """Add the mini-batch's gradient; return the metrics of each pass, `_STEP`."""
        total = max(1, int((batch.loss_mask != 0).sum()))
        return self._gradient_of_share(self.shares(batch, reads=("values", "returns")), total)

    @run_on_all_ranks
    def _gradient_of_share(self, shares: PerRank[Share], total: int) -> list[dict[str, float]]:
        """Add the gradient of this rank's passes of a mini-batch with so many trained tokens."""
        share = shares.here
        batch = share.batch
        assert batch.values is not None and batch.returns is not None
        results = []
        for micro in reduce_at_last(self.root, share.passes, self.ranks):
            index = response_positions(batch, micro)
            old = batch.values[index]
            returns = batch.returns[index]
            values = self.values(micro)
            losses, clipped = value_loss(
                values,
                _backend.to_device_of(old, values),
                _backend.to_device_of(returns, values),
                value_clip=self.value_clip,
            )
            loss = losses.sum() / total
            loss.backward()
            mean = values.detach().sum() / total
            clipped_share = clipped.sum() / total
            # Divided by the mini-batch's tokens: the sums over all passes are its means.
            named = dict(zip(_STEP, (loss, mean, clipped_share), strict=True))
            results.append(_backend.read_numbers(named))
        return self.ranks.gather(results)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    *,
    value_clip: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (M,) losses, half the squared errors, and (M,) bool where the clip is active.

    With a clip, the loss is the larger of the value's squared error and that of the value clamped
    to within `value_clip` of the old one (as in PPO2 and SkyRL): a larger step gains nothing.

    Args:
        values, old_values, returns: (M,) float32; old values are those that the returns were
            computed from.

    Example:
        >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]),
        ...            value_clip=0.5)
        (tensor([0.1250]), tensor([True]))
    """
    plain = (values - returns).square()
    if value_clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    moved = values - old_values
    clamped = old_values + moved.clamp(-value_clip, value_clip)
    clipped = (clamped - returns).square()
    # Inside the range the sum differs from the value by rounding alone.
    is_active = (moved.abs() > value_clip) & (clipped > plain)
    return 0.5 * torch.maximum(plain, clipped), is_active


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """Return 1 - var(returns - values) / var(returns): 1 is perfect, 0 as good as a constant."""
    if returns.numel() < 2 or float(returns.var()) == 0.0:
        return 0.0
    return float(1 - (returns - values).var() / returns.var())


def make_critic(
    config: Config,
    path: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_prompts: int,
    ranks: Ranks = SINGLE_RANK,
    policy: Policy | None = None,
) -> Critic:
    """Return the critic of a run, from the settings.

    Args:
        path: a model's folder or hub name, or the critic's folder in a checkpoint.
        policy: whose base it shares, which has its weights already; None: it is loaded.
    """
    trainer = config.trainer
    size = trainer.critic_mini_batch_size or trainer.policy_mini_batch_size
    if policy is not None:
        model = ValueModel(policy.backbone)
    else:
        checkpointing = recomputes_activations(trainer, device)
        model = load_value_model(
            path, device=device, gradient_checkpointing=checkpointing, ranks=ranks
        )
        if trainer.residual_dtype == "auto":
            round_residual_stream(model)
    return Critic(
        model,
        trainer.critic.optimizer_config,
        total_steps=total_optimizer_steps(config, num_prompts, mini_batch_size=size),
        mini_batch_size=size,
        update_epochs=trainer.update_epochs_per_batch,
        value_clip=trainer.algorithm.value_clip,
        max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
        dtype=dtype,
        tree=uses_trees(trainer.row_layout),
        ranks=ranks,
        policy=policy,
    )


def load_value_model(
    path: str,
    *,
    device: torch.device,
    gradient_checkpointing: bool = False,
    ranks: Ranks = SINGLE_RANK,
) -> ValueModel:
    """Return the model of a folder or hub name, with the head stored there or a new one.

    Args:
        ranks: see `load_model`.
    """
    with _without_warnings():  # about the unused LM head
        backbone = load_model(
            path,
            device=device,
            gradient_checkpointing=gradient_checkpointing,
            with_head=False,
            setting="trainer.critic.model.path",
            ranks=ranks,
        )
    return ValueModel(backbone, Path(expanduser(path)))


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
