"""The policy: a transformers causal LM, and its logprobs of trained tokens.

Weights and AdamW's moments are always float32; on a GPU the forward pass runs in bfloat16 by
autocast. A response tokens of a batch, M trained tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_fast.batch import StepBatch
from skyrl_fast.config.settings import LoraConfig
from skyrl_fast.ops import _backend
from skyrl_fast.rollout.engine.weights.buckets import TensorInfo
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
from skyrl_fast.rollout.engine.weights.tensor_file import infos_of
from skyrl_fast.rollout.engine.weights.transfer import OF_POLICY
from skyrl_fast.rollout.engine.weights.transports.rank_ipc import RankBuckets
from skyrl_fast.train.model.lm_head import (
    backbone,
    find_head,
    freeze_other_parts,
)
from skyrl_fast.train.model.loading import (
    checkpoint_gradients,
    checkpoints_gradients,
    read_processor_files,
)
from skyrl_fast.train.model.lora import (
    CRITIC,
    NAME,
    FrozenBase,
    adapter_names,
    adapter_off,
    adapters_of,
    add_adapter,
    check_adapters_called,
    merge,
    remove_adapter,
)
from skyrl_fast.train.model.micro_batch import (
    MicroBatch,
)
from skyrl_fast.train.model.random_passes import (
    keep_random_state,
    probe_inputs,
    refuse_random_passes,
)
from skyrl_fast.train.model.router_replay import RouterReplay
from skyrl_fast.train.model.trained_model import TokenValues, TrainedModel, per_token
from skyrl_fast.train.model.tree_forward import padded_trees
from skyrl_fast.train.parallel.export import checkpoint_names
from skyrl_fast.train.parallel.per_rank import PerRank
from skyrl_fast.train.parallel.rank_buckets import share_buckets
from skyrl_fast.train.parallel.rank_shares import Share
from skyrl_fast.train.parallel.ranks import SINGLE_RANK, Ranks, run_on_all_ranks
from skyrl_fast.train.parallel.sharding import (
    empty_weights,
    full_state_dict,
    gathered_outside_layers,
    weight_names,
    with_full_params,
)


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """A policy's weights, gathered layer by layer while they are iterated, as often as they are.

    Each layer is one call on all ranks, which no other call interrupts: so all ranks gather in the
    same order, whatever rank 0 does in between and in other threads.
    """

    policy: Policy
    dtype: torch.dtype | None
    adapter: bool = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        policy = self.policy
        if self.adapter:
            for name in policy.adapters:
                if name == NAME:
                    of_policy = ""
                else:
                    of_policy = f"{name}{OF_POLICY}"
                weights = policy.adapter_weights(name, self.dtype)
                for key, value in adapter_names(weights).items():
                    yield of_policy + key, value
            return
        # Merged, a weight is rounded once: by whoever casts it.
        dtype = None if policy.has_adapter else self.dtype
        for names in weight_names(policy):
            layer = self._under_checkpoint_names(full_state_dict(policy, dtype, names))
            while layer:
                name = next(iter(layer))
                # So that the layer's memory is freed weight by weight.
                yield name, layer.pop(name)

    def infos(self, dtype: torch.dtype | None) -> list[TensorInfo] | None:
        """Return name, dtype and shape of what is gathered, cast to a dtype, if any; None: all of
        it exists on this rank.
        """
        policy = self.policy
        if self.adapter or policy.ranks.size == 1:
            return None
        if dtype is None and not policy.has_adapter:
            dtype = self.dtype
        groups = weight_names(policy)
        empty = empty_weights(policy, [name for names in groups for name in names])
        result: list[TensorInfo] = []
        for names in groups:
            layer = self._under_checkpoint_names({name: empty[name] for name in names})
            result += infos_of(layer, dtype)
        return result

    def share(self, dtype: torch.dtype | None, bucket_bytes: int) -> RankBuckets:
        """See `RankWeights`.

        Raises:
            WeightSyncError: a single rank has the weights, or the model has an adapter.
        """
        infos = self.infos(dtype)
        if infos is None or self.policy.has_adapter:
            # Ranks would multiply adapters each by itself: not always to the same bits.
            raise WeightSyncError(
                "weight_sync_backend: ipc: expected several ranks and a policy without an adapter, "
                f"got {self.policy.ranks.size}, has_adapter={self.policy.has_adapter}"
            )
        return share_buckets(
            self.policy,
            infos,
            dtype=self.dtype if dtype is None else dtype,
            groups=weight_names(self.policy),
            bucket_bytes=bucket_bytes,
        )

    def _under_checkpoint_names(self, layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        policy = self.policy
        return checkpoint_names(policy.model, merge(policy.model, layer, policy.adapter or NAME))


class Policy(TrainedModel):
    """A causal LM with logprobs of trained tokens; an `Optimizer` updates its weights.

    Args:
        model: any transformers causal LM whose logits are `lm_head(hidden states)`, or a
            vision-language model that has one: its other parts are frozen.
        temperature: of sampling, so that logprobs are those of the sampling distribution.
        max_tokens_per_microbatch: most padded tokens of one forward pass.
        dtype: of the forward pass; the weights are float32.
        head_dtype: of the LM head's matrix product; None: `dtype`.
        router_replay: route tokens to the experts that the engine recorded; see `RouterReplay`.
        tree: process rows as prefix trees, each distinct token of a pass once; None: where
            the model supports it and it takes less time.
        saved_logits_bytes: the most logits to save for a backward pass; see `linear_logprob`.

    Raises:
        ValueError: the model's head is none that `find_head` knows, the model is
            random in training mode, its routers do not support replay, or its attention does not
            support trees.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        max_tokens_per_microbatch: int = 16384,
        dtype: torch.dtype = torch.float32,
        head_dtype: torch.dtype | None = None,
        router_replay: bool = False,
        tree: bool | None = False,
        saved_logits_bytes: int | None = None,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        names = adapters_of(model)
        self.adapters = tuple(name for name in names if name != CRITIC)
        super().__init__(
            model,
            pretrained=model,
            backbone=backbone(model),
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            dtype=dtype,
            ranks=ranks,
            adapter=self.adapters[0] if self.adapters else None,
        )
        self.model = model
        self.frozen_parts = freeze_other_parts(model)
        self.refused_tokens = placeholder_tokens(model.config)
        self._processor = read_processor_files(model)
        self.temperature = temperature
        is_double = model.dtype == torch.float64  # models in tests
        if is_double:
            self.head_dtype = torch.float64
        else:
            self.head_dtype = head_dtype or dtype
        self.saved_logits_bytes = saved_logits_bytes
        self._replay: RouterReplay | None = None
        if router_replay:
            self._replay = RouterReplay(model)
        if self._replay is not None and checkpoints_gradients(model):
            checkpoint_gradients(model, context_fn=self._replay.checkpoint_contexts)
        self.distribute()
        with gathered_outside_layers(model):
            refuse_random_passes(model, self.autocast)
        # Each by itself: a backward pass frees what is gathered.
        with gathered_outside_layers(model), keep_random_state(self.device):
            self.head = find_head(model, self.autocast)
        if names:
            compute = partial(self.backbone, **probe_inputs(model))
            with gathered_outside_layers(model), torch.no_grad(), self.autocast():
                check_adapters_called(model, compute)
        self.choose_layout(tree)
        self.frozen_base = FrozenBase(model)
        # Models of the run whose weights leave the device while engines generate.
        self.leaving: tuple[TrainedModel, ...] = ()
        self._by_adapter = dict.fromkeys(self.adapters[:1], self)
        for name in self.adapters[1:]:
            # One model, and what was found out about it; only the adapter of the passes is another.
            self._by_adapter[name] = other = copy.copy(self)
            other.adapter = name
            ranks.register(other)

    @property
    def vocab_size(self) -> int:
        """Number of ids that the LM head has logits of."""
        return int(self.head.module.weight.shape[0])

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained in place of the model's own weights."""
        return self.adapter is not None

    def with_adapter(self, name: str) -> Policy:
        """Return the policy of the same model whose passes and optimizer steps use this adapter."""
        return self._by_adapter[name]

    def add_adapter(
        self, name: str, lora: LoraConfig, *, base: str, folder: Path | None = None
    ) -> Policy:
        """Add an adapter to the model, next to those that it has; return its policy.

        With one rank only: shards are made of what the model has at its start.

        Args:
            name: another one than those of the model's adapters, without a dot.
            lora, base, folder: see `lora.add_adapter`.

        Raises:
            ValueError: the settings do not fit the model, or the folder's adapter.
        """
        assert self.ranks.size == 1 and name not in self._by_adapter
        add_adapter(self.model, lora, base=base, folder=folder, name=name)
        added = copy.copy(self)
        added.adapter = name
        self._by_adapter[name] = added
        return added

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that `add_adapter` added; its policy cannot be used afterwards."""
        del self._by_adapter[name]
        remove_adapter(self.model, name)

    @property
    def router_replay(self) -> bool:
        """Whether `logprobs` replays recorded routes."""
        return self._replay is not None

    def logprobs(
        self, micro: MicroBatch, *, return_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (M,) float32 logprobs of the micro-batch's trained tokens, and their entropies."""
        micro = padded_trees(micro, self.device, self.ranks.sequence)
        self.use_adapter()

        def distinct() -> Any:
            states = self._predicting_states(micro)
            return self._head_logprobs(micro, states, return_entropy=return_entropy)

        result = with_full_params(self.model, distinct)
        if not return_entropy:
            return micro.joined(result), None
        values, entropy = result
        return micro.joined(values), micro.joined(entropy)

    def _head_logprobs(self, micro: MicroBatch, states: torch.Tensor, **options: Any) -> Any:
        """Return what `linear_logprob` does for the entries of a pass."""
        # Without waiting: the host prepares the backward pass while the device computes.
        there = partial(_backend.to_device, device=self.device)
        if micro.kept_ids is None:
            kept_ids = None
        else:
            kept_ids = there(micro.kept_ids)
        return self.head.logprobs(
            states,
            there(micro.target_ids),
            temperature=self.temperature,
            kept_ids=kept_ids,
            cu_kept=micro.cu_kept,
            saved_logits_bytes=self.saved_logits_bytes,
            **options,
        )

    def logprobs_with_others(
        self, micro: MicroBatch, other_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `logprobs` and entropies of a pass, and (M, K) logprobs of (M, K) other ids.

        The others are those of the softmax over the vocabulary, also where a token was sampled from
        a part of it. With one rank only.
        """
        assert self.ranks.size == 1
        micro = padded_trees(micro, self.device, self.ranks.sequence)
        self.use_adapter()
        states = self._predicting_states(micro)
        values, entropy = self._head_logprobs(micro, states, return_entropy=True)
        ids = _backend.to_device(other_ids, self.device)
        others = self.head.gathered_logprobs(
            micro.joined(states), ids, temperature=self.temperature
        )
        return micro.joined(values), micro.joined(entropy), others

    def gathered_logprobs(self, micro: MicroBatch, target_ids: torch.Tensor) -> torch.Tensor:
        """Return (M, K) log-probabilities of these (M, K) ids in place of the trained tokens.

        With one rank only.
        """
        assert self.ranks.size == 1
        self.use_adapter()
        hidden = micro.joined(self._predicting_states(micro))
        ids = _backend.to_device(target_ids, self.device)
        return self.head.gathered_logprobs(hidden, ids, temperature=self.temperature)

    def _predicting_states(self, micro: MicroBatch) -> torch.Tensor:
        """Return the hidden states that predict a pass's entries, in the head's dtype."""
        with self._replayed(micro):
            hidden = self.hidden_states(micro)
        index = _backend.to_device(micro.hidden_index, self.device)
        # Norms return float32 under autocast, which would slow down the largest product.
        return hidden.index_select(0, index).to(self.head_dtype)

    def batch_logprobs(self, batch: StepBatch, *, adapter: bool = True) -> torch.Tensor:
        """Return (A,) float32 logprobs of the trained tokens, without gradients; 0 elsewhere.

        Args:
            adapter: False: those of the model without its adapter, which routes freely.
        """
        shares = self.shares(batch, router_replay=adapter and self.router_replay)
        return per_token(batch, self._logprobs_of_share(shares, adapter))

    @run_on_all_ranks
    def _logprobs_of_share(self, shares: PerRank[Share], adapter: bool) -> list[TokenValues]:
        if adapter:
            return self.values_of_share(shares.here, self._trained_logprobs)
        replay = self._replay
        self._replay = None
        try:
            with adapter_off(self.model):
                return self.values_of_share(shares.here, self._trained_logprobs)
        finally:
            self._replay = replay

    def _trained_logprobs(self, micro: MicroBatch) -> torch.Tensor:
        return self.logprobs(micro)[0]

    @run_on_all_ranks
    def sequence_logprobs(
        self, sequences: list[list[int]], routes: list[np.ndarray] | None = None
    ) -> list[tuple[list[float], float]]:
        """Return each sequence's logprobs from its second token on, at temperature 1.

        And the standard deviation of their logits over the vocabulary, the mean of the tokens. The
        head computes in float32, which adds no rounding to that of the hidden states.

        Args:
            routes: (T or T - 1, L, K) of each sequence, to replay; None: free routing.
        """
        rows = [torch.tensor(sequence, device=self.device) for sequence in sequences]
        # No token sees the padding, which is after it. One pass reads (and gathers) weights once.
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        self.use_adapter()

        def values() -> tuple[torch.Tensor, ...]:
            with self.autocast(), self._at_routes(ids, routes):
                hidden = self.backbone(input_ids=ids, use_cache=False).last_hidden_state
            hidden = hidden.to(torch.promote_types(self.model.dtype, torch.float32))
            return tuple(of_row(row, states) for row, states in zip(rows, hidden, strict=True))

        def of_row(row: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            logits = self.head.logits(states[: len(row) - 1])
            chosen = logits.gather(1, row[1:, None])[:, 0]
            # Not log_softmax, whose sum over a large vocabulary is inexact in float32.
            logprobs = chosen - logits.logsumexp(-1)
            return torch.cat((logprobs, logits.std(-1).mean()[None]))

        with torch.no_grad():
            results = with_full_params(self.model, values)
        return [(logprobs, deviation) for *logprobs, deviation in map(torch.Tensor.tolist, results)]

    def named_weights(
        self, dtype: torch.dtype | None = None, *, adapter: bool = False
    ) -> NamedWeights:
        """Return what training changes under the names of a Hugging Face checkpoint; tied once.

        Layers of which no parameter is trained are left out. Of a model with an adapter these are
        all weights, with the adapter merged in.

        Args:
            dtype: that they may be cast to, where they are moved to main memory; None: as they are.
            adapter: only the matrices of all adapters, under their names in PEFT's files; those of
                named policies begin with the name and `OF_POLICY`.
        """
        return NamedWeights(self, dtype, adapter)

    @run_on_all_ranks
    def offload_base(self) -> None:
        """Free the device's memory of frozen weights until `load_base`; see `FrozenBase`."""
        self.frozen_base.offload()

    @run_on_all_ranks
    def load_base(self) -> None:
        self.frozen_base.load()

    def offload_weights(self) -> None:
        """Move the weights of the run's models to main memory, if they are to leave the device."""
        for model in self.leaving:
            model.move_to_host()

    def load_weights(self) -> None:
        for model in self.leaving:
            model.move_to_device()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of this rank's weights that `offload_weights` moves."""
        return sum(model.idle.num_bytes for model in self.leaving if model.idle is not None)

    @run_on_all_ranks
    def free_cached_memory(self) -> None:
        """Return the GPU memory that torch keeps for later tensors."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def save(self, folder: Path, tokenizer: Any | None = None) -> None:
        """Write the model (and its tokenizer) in Hugging Face format; of LoRA the adapters.

        Adapters of named policies have a folder each. Several ranks queue the weights in
        `ranks.files`. Of a vision-language model the folder has the files of its processor, too,
        which engines ask for.
        """
        if self.has_adapter:
            for name in self.adapters:
                if name == NAME:
                    of_policy = folder
                else:
                    of_policy = folder / name
                self.save_adapter(name, of_policy)
        else:
            self.save_weights(folder)
            for name, content in self._processor.items():
                (folder / name).write_bytes(content)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def _replayed(self, micro: MicroBatch) -> contextlib.AbstractContextManager[Any]:
        if self._replay is None:
            return contextlib.nullcontext()
        if micro.expert_indices is None or micro.router_padding_mask is None:
            raise ValueError("policy: router replay needs a micro-batch planned with its routes")
        return self._replay.routes(
            _backend.to_device(micro.expert_indices, self.device),
            _backend.to_device(micro.router_padding_mask, self.device),
        )

    def _at_routes(
        self, ids: torch.Tensor, routes: list[np.ndarray] | None
    ) -> contextlib.AbstractContextManager[Any]:
        if routes is None:
            return contextlib.nullcontext()
        if self._replay is None:
            raise ValueError("policy: routes are given, but router_replay is off")
        rows = [torch.from_numpy(of_row.astype(np.int32)) for of_row in routes]
        captured = torch.tensor([len(of_row) for of_row in rows])
        mask = torch.arange(ids.shape[1])[None] >= captured[:, None]
        padded = torch.zeros((*ids.shape, *rows[0].shape[1:]), dtype=torch.int32)
        padded[~mask] = torch.cat(rows)
        return self._replay.routes(padded.to(ids.device), mask.to(ids.device))


@dataclass(frozen=True, slots=True)
class WithoutAdapter:
    """A policy's model with its adapter off, as reference: no second model in memory."""

    policy: Policy

    def batch_logprobs(self, batch: StepBatch) -> torch.Tensor:
        return self.policy.batch_logprobs(batch, adapter=False)


Reference = Policy | WithoutAdapter  # the reference of a KL term


def placeholder_tokens(config: Any) -> tuple[int, ...]:
    """Return the token ids that stand for images, videos and sounds."""
    names = []
    for kind in ("image", "video", "audio"):
        for of in ("id", "index"):
            names.append(f"{kind}_token_{of}")
    ids = {getattr(config, name, None) for name in names}
    return tuple(sorted(id for id in ids if id is not None))
