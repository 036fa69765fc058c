"""The engine's side: what loads new weights in vLLM's worker processes.

Design: docs/design/007-rollout-and-weight-sync.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from skyrl_fast.rollout.engine.vllm_patches.adapter_products import multiply_by_adapter
from skyrl_fast.rollout.engine.vllm_patches.compiled_norms import use_compiled_norms
from skyrl_fast.rollout.engine.vllm_patches.expert_kernels import use_cpu_experts
from skyrl_fast.rollout.engine.vllm_patches.kept_logprobs import return_kept_only
from skyrl_fast.rollout.engine.vllm_patches.normalized_logprobs import normalize_logprobs
from skyrl_fast.rollout.engine.vllm_patches.packed_weights import renew_packed_weights
from skyrl_fast.rollout.engine.vllm_patches.seeded_sampling import sample_by_inversion
from skyrl_fast.rollout.engine.weights.group import WeightsGroup, store_at
from skyrl_fast.rollout.engine.weights.receipt import Receipt, dtype_name, record_digests
from skyrl_fast.rollout.engine.weights.transfer import LOAD, OF_POLICY
from skyrl_fast.rollout.engine.weights.transports import TRANSPORTS
from skyrl_fast.rollout.engine.weights.transports.ipc import CUDA, CudaIpc


class WeightUpdateExtension:
    """Mixed into vLLM's worker class; its methods run in the engine's process.

    It has a method for each transport, such as `load_weights_file`.
    """

    model_runner: Any
    model_config: Any
    parallel_config: Any
    rank: int  # number among the engine's workers
    device: torch.device
    weights_group: WeightsGroup
    cuda_ipc: CudaIpc = CUDA
    patches: dict[str, bool] | None = None  # by name: whether it is in use
    reload_weights: Callable[..., None]

    def apply_patches(self) -> dict[str, bool]:
        """Sample and compute with less work (`vllm_patches`); return which patches are in use."""
        if self.patches is None:  # a trainer that connects again asks again
            sampler = self.model_runner.sampler
            self.patches = {
                "kept_logprobs": return_kept_only(sampler),
                "seeded_sampling": sample_by_inversion(sampler) and self.device.type == "cpu",
            }
            if self.device.type == "cpu":
                self._patch_cpu_kernels(self.patches)
        return self.patches

    def _patch_cpu_kernels(self, patches: dict[str, bool]) -> None:
        patches["normalized_logprobs"] = normalize_logprobs(self.model_runner.sampler)
        patches["adapter_products"] = self.model_runner.lora_config is not None
        if patches["adapter_products"]:
            multiply_by_adapter()
            patches["cpu_experts"] = use_cpu_experts(self.model_runner.get_model())
        patches["compiled_norms"] = bool(self.model_config.enforce_eager)
        if patches["compiled_norms"]:
            use_compiled_norms()

    def weights_dtype(self) -> str | None:
        """Return the dtype of all floating-point parameters; None: they differ, or are quantized.

        Weights of another dtype are cast when they are loaded, so they may be cast before.
        """
        parameters = self.model_runner.get_model().parameters()
        dtypes = {dtype_name(parameter.dtype) for parameter in parameters}
        if len(dtypes) == 1:
            return dtypes.pop()
        return None

    def join_weights_group(self, backend: str, address: str, port: int, size: int) -> None:
        """Connect with the trainer, for `load_weights_broadcast` or `load_weights_rank_ipc`."""
        if backend == "gloo":
            device = torch.device("cpu")
        else:
            device = self.device
        group = WeightsGroup(backend, rank=self.rank + 1, size=size, device=device, trainer=address)
        group.connect(store_at(address, port))
        self.weights_group = group

    def _load(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        adapter: str | None = None,
        versions: Mapping[str, int] | None = None,
        num_sharing: int = 1,
    ) -> dict[str, Any]:
        """Load weights, or adapters by their config and policy `versions`; return a `Receipt`.

        Args:
            num_sharing: workers that read the same memory, and divide its digests.
        """
        if adapter is not None:
            return self._replace_adapters(weights, json.loads(adapter), versions or {})
        model = self.model_runner.get_model()
        names = _names_of_parameters(model)
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
            share: dict[str, Any] = {}
            if num_sharing > 1:
                share = {"rank": self.rank, "num_sharing": num_sharing}
            recorded = record_digests(weights, digests, **share)
            with renew_packed_weights(model):
                # The worker's method, not the runner's: it sets the config that kernels ask for.
                self.reload_weights(weights_iterator=recorded)
        finally:
            del model.load_weights
        return asdict(
            Receipt(
                digests=digests,
                unloaded=[] if loaded is None else _find_unloaded(names, loaded),
                dtype=dtype_name(self.model_config.dtype),
            )
        )

    def _replace_adapters(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        config: dict[str, Any],
        versions: Mapping[str, int],
    ) -> dict[str, Any]:
        """Load an adapter for each policy in place of those before.

        Args:
            weights: named by policy, `OF_POLICY` and matrix; "" is the policy without a name.
        """
        digests: dict[str, str] = {}
        of_policies: dict[str, dict[str, torch.Tensor]] = {name: {} for name in versions}
        for name, value in record_digests(weights, digests):
            policy, _, matrix = name.rpartition(OF_POLICY)
            of_policies[policy][matrix] = value.clone()  # vLLM scales matrices in place
        self.model_runner.lora_manager._adapter_manager.remove_all_adapters()
        unloaded = [
            name
            for policy, matrices in of_policies.items()
            for name in self._load_adapter(matrices, config, versions[policy])
        ]
        return asdict(Receipt(digests, unloaded, dtype_name(self.model_config.dtype)))

    def _load_adapter(
        self, matrices: dict[str, torch.Tensor], config: dict[str, Any], version: int
    ) -> list[str]:
        """Load an adapter; return modules without adapter layers, whose matrices are left out."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self.model_runner.lora_manager._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        if mapper is None:
            weights_mapper = None
        else:
            weights_mapper = mapper.get_rename_mapper()
        lora = LoRAModel.from_lora_tensors(
            version,
            matrices,
            PEFTHelper.from_dict(config),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=weights_mapper,
        )
        manager.add_adapter(lora)
        manager.activate_adapter(version)
        return sorted(name for name in lora.loras if name not in manager.modules)


def _make_load(name: str) -> Callable[..., dict[str, Any]]:
    def load(worker: WeightUpdateExtension, *arguments: Any, **adapter: Any) -> dict[str, Any]:
        transport = TRANSPORTS[name]
        if transport.shares_memory:
            adapter["num_sharing"] = worker.parallel_config.world_size
        receipt = worker._load(transport.receive(worker, *arguments), **adapter)
        transport.finish(worker)
        return receipt

    return load


for _name in TRANSPORTS:  # vLLM calls a worker's methods by their names
    setattr(WeightUpdateExtension, f"{LOAD}{_name}", _make_load(_name))


def _names_of_parameters(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each parameter; one that several modules share has several."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.values())


def _find_unloaded(parameters: Iterable[list[str]], loaded: set[str]) -> list[str]:
    """Return the first name of parameters that `loaded` has by none of their names.

    vLLM names experts' weights by the layer above.
    """
    return sorted(
        names[0]
        for names in parameters
        if loaded.isdisjoint({*names, *(name.replace(".routed_experts.", ".") for name in names)})
    )
