"""The engine's side: what loads new weights in vLLM's worker processes.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from skyrl_fast.rollout.engine.vllm_patches.kept_logprobs import return_kept_only
from skyrl_fast.rollout.engine.vllm_patches.packed_weights import renew_packed_weights
from skyrl_fast.rollout.engine.vllm_patches.seeded_sampling import sample_by_inversion
from skyrl_fast.rollout.engine.weights.group import WeightsGroup, store_at
from skyrl_fast.rollout.engine.weights.receipt import Receipt, dtype_name, record_digests
from skyrl_fast.rollout.engine.weights.transports.broadcast import receive_by_broadcast
from skyrl_fast.rollout.engine.weights.transports.file import receive_by_file
from skyrl_fast.rollout.engine.weights.transports.ipc import receive_by_ipc


class WeightUpdateExtension:
    """Mixed into vLLM's worker class; its methods run in the engine's process."""

    model_runner: Any
    model_config: Any
    rank: int  # of the engine's workers
    device: torch.device
    weights_group: WeightsGroup
    sampler_is_prepared = False
    reload_weights: Callable[..., None]

    def prepare_sampler(self) -> None:
        """Sample with less work; see `kept_logprobs` and `seeded_sampling`."""
        if not self.sampler_is_prepared:  # a trainer that connects again asks again
            return_kept_only(self.model_runner.sampler)
            sample_by_inversion(self.model_runner.sampler)
            self.sampler_is_prepared = True

    def weights_dtype(self) -> str | None:
        """Return the dtype of all floating-point parameters; None: they differ, or are quantized.

        Weights of another dtype are cast when they are loaded, so they may be cast before.
        """
        parameters = self.model_runner.get_model().parameters()
        dtypes = {dtype_name(parameter.dtype) for parameter in parameters}
        return dtypes.pop() if len(dtypes) == 1 else None

    def load_weights_file(self, path: str) -> dict[str, Any]:
        """Load the tensors of a safetensors file; return a `Receipt` as a dict."""
        return self._load(receive_by_file(path))

    def load_weights_ipc(self, handles: list[Any]) -> dict[str, Any]:
        """Load tensors from the trainer's GPU memory; return a `Receipt` as a dict."""
        receipt = self._load(receive_by_ipc(handles))
        torch.accelerator.synchronize()  # all is read before the trainer continues
        torch.cuda.ipc_collect()
        return receipt

    def join_weights_group(self, backend: str, address: str, port: int, size: int) -> None:
        """Connect with the trainer, for `load_weights_broadcast`.

        Args:
            backend: as for `WeightsGroup`.
            size: number of workers, and one.
        """
        device = self.device if backend == "nccl" else torch.device("cpu")
        group = WeightsGroup(backend, rank=self.rank + 1, size=size, device=device, trainer=address)
        group.connect(store_at(address, port))
        self.weights_group = group

    def load_weights_broadcast(self) -> dict[str, Any]:
        """Load the tensors that the trainer sends meanwhile; return a `Receipt` as a dict."""
        return self._load(receive_by_broadcast(self.weights_group))

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        model = self.model_runner.get_model()
        parameters = {name for name, _ in model.named_parameters()}
        load_weights = model.load_weights
        loaded: set[str] | None = None
        digests: dict[str, str] = {}

        # reload_weights returns nothing; the model's loader says which parameters it has set.
        def load_and_record(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
            nonlocal loaded
            loaded = load_weights(weights)
            return loaded

        model.load_weights = load_and_record
        try:
            with renew_packed_weights(model):
                # The worker's method, not the runner's: it sets the config that kernels ask for.
                self.reload_weights(weights_iterator=record_digests(weights, digests))
        finally:
            del model.load_weights
        return asdict(
            Receipt(
                digests=digests,
                unloaded=[] if loaded is None else _find_unloaded(parameters, loaded),
                dtype=dtype_name(self.model_config.dtype),
            )
        )


def _find_unloaded(parameters: set[str], loaded: set[str]) -> list[str]:
    """Return parameters not in `loaded`, where vLLM names experts' weights by the layer above."""
    return sorted(
        name for name in parameters if not {name, name.replace(".routed_experts.", ".")} & loaded
    )
