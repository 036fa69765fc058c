"""The LM head of a causal LM: from its last hidden states to its logits.

The language model may be a part of a vision-language model, whose other parts are frozen.

Models scale or cap their logits after the head, under different names in their configurations, or
scale the hidden states before it. What a model does is measured: the head's output is replaced by
known values, and the model's logits are fitted.

H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils.checkpoint import checkpoint

from skyrl_fast.ops.logprob.gathered import gathered_logprob
from skyrl_fast.ops.logprob.linear import linear_logprob
from skyrl_fast.train.model.rope_limits import rope_limits

CHUNK_BYTES = 128 << 20  # of logits, as `linear_logprob` has on a CPU
MIN_CHUNK_ROWS = 64
PROBE_TOKENS = 8
PROBE_TOLERANCE = 1e-3  # relative; float32 noise is below 1e-5
SMALL = 2.0**-13  # scale of a head's output where no cap shows: exact in every dtype
LARGE = 2.0**20  # where every cap does
SPREAD = 100.0  # range of the outputs between, which the fit has to meet
FIT_TOLERANCE = 1e-5
LOGITS = 30.0  # the largest of the probe: as of trained models; fresh ones have small logits


@dataclass(frozen=True, slots=True)
class LmHead:
    """Logits `z = logit_scale * (hidden @ weight.T + bias)`, or `soft_cap * tanh(z / soft_cap)`.

    Args:
        module: has the weight and perhaps a bias, both read at each use: sharding replaces them.
    """

    module: Any
    logit_scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (..., V) logits of (..., H) hidden states, in their dtype."""
        weight, bias = self._operands(hidden.dtype)
        logits = torch.nn.functional.linear(hidden, weight, bias) * self.logit_scale
        cap = self.soft_cap
        if cap is None:
            return logits
        return cap * torch.tanh(logits / cap)

    def logprobs(self, hidden: torch.Tensor, target_ids: torch.Tensor, **options: Any) -> Any:
        """Return `linear_logprob` of (..., H) hidden states; options are its own."""
        weight, bias = self._operands(hidden.dtype)
        return linear_logprob(
            hidden,
            weight,
            target_ids,
            bias=bias,
            logit_scale=self.logit_scale,
            soft_cap=self.soft_cap,
            **options,
        )

    def gathered_logprobs(
        self, hidden: torch.Tensor, target_ids: torch.Tensor, *, temperature: float
    ) -> torch.Tensor:
        """Return (M, K) log-probabilities of (M, K) ids from (M, H) hidden states.

        The logits of one chunk of rows are in memory; the backward pass computes them again.
        """

        def of_chunk(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return gathered_logprob(self.logits(states), ids, temperature=temperature)

        vocabulary = self.module.weight.shape[0]
        rows = max(MIN_CHUNK_ROWS, CHUNK_BYTES // (vocabulary * hidden.element_size()))
        chunks = zip(hidden.split(rows), target_ids.split(rows), strict=True)
        return torch.cat([checkpoint(of_chunk, *one, use_reentrant=False) for one in chunks])

    def _operands(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self.module.weight.to(dtype)
        bias = getattr(self.module, "bias", None)
        if bias is not None:
            bias = bias.to(dtype)
        return weight, bias


def layers_of(backbone: Any) -> torch.nn.ModuleList:
    """Return the list of a backbone's layers: the module list with the most parameters."""
    lists = []
    for module in backbone.modules():
        if isinstance(module, torch.nn.ModuleList):
            lists.append(module)

    def num_parameters(layers: torch.nn.ModuleList) -> int:
        return sum(parameter.numel() for parameter in layers.parameters())

    return max(lists, key=num_parameters)


def backbone(model: Any) -> Any:
    """Return the part of a model whose output is the language model's last hidden states."""
    if is_vision_language(model):
        model = model.get_decoder()  # with its head in Llama 4
    base = getattr(model, "base_model", model)
    return getattr(model, "model", base) if base is model else base  # Llama 4's prefix is another


def is_vision_language(model: Any) -> bool:
    """Return whether a model has a language model next to others, such as one of images."""
    return model.config.get_text_config() is not model.config


def freeze_other_parts(model: Any) -> tuple[str, ...]:
    """Freeze what is outside a model's language model and head; return the modules' names."""
    if not is_vision_language(model):
        return ()
    # Rows are text, which only the language model sees.
    language_model = backbone(model)
    head = model.get_output_embeddings()
    kept = {*language_model.parameters()}
    if head is not None:
        kept |= {*head.parameters()}
    paths = {module: name for name, module in model.named_modules()}
    path = paths[language_model]
    parts = []
    for name, parameter in model.named_parameters():
        if parameter not in kept:
            parameter.requires_grad_(False)
            parts.append(_part_outside(name, path))
    return tuple(dict.fromkeys(parts))


def _part_outside(name: str, path: str) -> str:
    """Return the largest part of a parameter's path that does not contain the one of `path`."""
    names = name.split(".")
    others = path.split(".")
    num_same = 0
    for one, other in zip(names, others, strict=False):
        if one != other:
            break
        num_same += 1
    return ".".join(names[: num_same + 1])


@contextlib.contextmanager
def _in_eval_mode(model: Any) -> Iterator[None]:
    """Compute in eval mode in the context: in training mode some models ask for images."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Compute a model of frozen 16-bit weights in float32 in the context, to check its code."""
    narrow: dict[torch.nn.Parameter, torch.Tensor] = {}

    def widen(module: Any, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and parameter.itemsize < torch.float32.itemsize:
                # While the module computes: never more than one module is in memory twice.
                narrow[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def restore(module: Any, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in narrow:
                parameter.data = narrow.pop(parameter)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            # Inside FSDP2's hooks, which gather the weights and free them.
            hooks.callback(module.register_forward_pre_hook(widen).remove)
            restoring = module.register_forward_hook(restore, prepend=True, always_call=True)
            hooks.callback(restoring.remove)
        yield


def find_head(model: Any, autocast: Callable[[], contextlib.AbstractContextManager[Any]]) -> LmHead:
    """Return the head of a causal LM, which gives the model's logits and their gradients.

    Raises:
        ValueError: the model is not causal, or changes its logits in another way than `LmHead`
            can, or by parameters that would not be trained.
    """
    head = model.get_output_embeddings()
    if head is None or not hasattr(model, "base_model"):
        raise ValueError(f"policy: expected a causal LM, got {type(model).__name__}")
    model, name = _find_owner(model, head)
    others = [name for name, _ in head.named_parameters() if name not in ("weight", "bias")]
    if others:
        _refuse(model, f"by {name}.{others[0]}, which would not be trained")
    vocabulary = head.weight.shape[0]
    ids = torch.arange(PROBE_TOKENS, device=head.weight.device)[None] % vocabulary
    with _in_eval_mode(model):
        return _probe_head(model, head, ids, autocast)


def _find_owner(model: Any, head: Any) -> tuple[Any, str]:
    """Return the innermost transformers model that has the head, and the head's name."""
    owner = model
    path = ""
    for name, module in model.named_modules():  # those that contain others first
        of_module = getattr(module, "get_output_embeddings", lambda: None)
        if of_module() is head:
            # A model around it may compute nothing without images, such as Llama 4.
            owner = module
        if module is head:
            path = name
    return owner, path


def _probe_head(
    model: Any,
    head: Any,
    ids: torch.Tensor,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> LmHead:
    with in_float32(model):
        with torch.no_grad():
            hidden = _last_hidden_states(model, ids)
            _check_causal(model, ids, hidden)
        inputs, scale, soft_cap = _fit(model, head, ids)
    hidden_scale = _hidden_scale(model, inputs, hidden)
    # The result has one scale, which would be the bias's, too.
    if getattr(head, "bias", None) is not None and hidden_scale != 1.0:
        _refuse(model, "by a scale of the hidden states and a bias")
    result = LmHead(head, scale * hidden_scale, soft_cap)
    _check(model, result, hidden_scale, ids, autocast)
    return result


def _last_hidden_states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    output = backbone(model)(input_ids=ids, use_cache=False)
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        name = type(backbone(model)).__name__
        raise ValueError(f"policy: the output of {name} has no last_hidden_state; not supported")
    return hidden


def _check_causal(model: Any, ids: torch.Tensor, hidden: torch.Tensor) -> None:
    """Raise ValueError if states depend on later tokens: rows share their common beginnings."""
    # Beyond a limit of its rotary embedding a row's states depend on its length.
    limits = (limit.length for limit in rope_limits(backbone(model).config))
    num_tokens = ids.shape[1]
    shortest = max((limit for limit in limits if limit < num_tokens), default=0)
    largest = hidden.abs().max().item()
    for length in range(1 + shortest, num_tokens):
        alone = _last_hidden_states(model, ids[:, :length])
        difference = (alone - hidden[:, :length]).abs().max().item()
        if not difference <= PROBE_TOLERANCE * max(1.0, largest):
            raise ValueError(
                f"policy: expected a causal LM, got {type(model).__name__}, whose hidden states "
                f"depend on later tokens (largest difference {difference:.3g})"
            )


def _fit(model: Any, head: Any, ids: torch.Tensor) -> tuple[torch.Tensor, float, float | None]:
    """Return the head's input, and the scale and cap of its outputs."""
    vocabulary = head.weight.shape[0]
    outputs = torch.linspace(-SPREAD, SPREAD, vocabulary, device=ids.device)
    outputs = outputs.repeat(1, ids.shape[1], 1)
    outputs[:, 0] = SMALL
    outputs[:, 1] = LARGE
    inputs: list[torch.Tensor] = []

    def replace(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        inputs.append(arguments[0].detach())
        return outputs.to(output.dtype)

    with head.register_forward_hook(replace), torch.enable_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    if not inputs:
        _refuse(model, "without calling it")
    if logits.requires_grad:  # the outputs are constants
        _refuse(model, "by parameters, which would not be trained")
    if logits.shape != outputs.shape:
        _refuse(model, f"to a shape of {tuple(logits.shape)}")
    logits = logits.double()
    outputs = outputs.double()
    scale = logits[0, 0].median().item() / SMALL
    highest = logits[0, 1].median().item()
    if 0 < highest < scale * LARGE / 2:
        soft_cap = highest
    else:
        soft_cap = None
    fitted = outputs * scale
    if soft_cap is not None:
        fitted = soft_cap * torch.tanh(fitted / soft_cap)
    if not (scale > 0 and torch.allclose(logits, fitted, rtol=FIT_TOLERANCE, atol=FIT_TOLERANCE)):
        _refuse(model, "by more than a scale and a soft cap")
    return inputs[-1], scale, soft_cap


def _hidden_scale(model: Any, inputs: torch.Tensor, hidden: torch.Tensor) -> float:
    """Return the factor by which the model multiplies its hidden states before the head."""
    inputs = inputs.double()
    hidden = hidden.double()
    # Quotients of small states are rounding.
    large = hidden.abs() >= hidden.abs().median()
    if inputs.shape == hidden.shape:
        scale = (inputs[large] / hidden[large]).median().item()
    else:
        scale = 0
    is_scaled = torch.allclose(inputs, hidden * scale, rtol=1e-4, atol=1e-5)
    if not scale > 0 or not is_scaled:
        _refuse(model, "by a change of the hidden states before it")
    if abs(scale - 1) < FIT_TOLERANCE:
        return 1.0
    return scale


def _check(
    model: Any,
    head: LmHead,
    hidden_scale: float,
    ids: torch.Tensor,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    """Compare logits and their gradients with the model's, at the size of trained logits."""

    def replace(module: Any, arguments: Any) -> torch.Tensor:
        return (hidden * hidden_scale).to(arguments[0].dtype)

    with torch.enable_grad(), autocast():
        hidden = _last_hidden_states(model, ids).detach()
        weight = head.module.weight.detach().to(hidden.dtype)
        logits = head.logit_scale * (hidden @ weight.T)
        largest = logits.abs().max().item()
        hidden = hidden * (LOGITS / max(largest, 1e-6))
        hidden.requires_grad_()
        with head.module.register_forward_pre_hook(replace):
            expected = model(input_ids=ids, use_cache=False).logits.float()
        got = head.logits(hidden).float()
        by_column = torch.linspace(0, 1, got.shape[-1], device=got.device)
        direction = by_column.expand_as(got)
        (gradient,) = torch.autograd.grad(got, hidden, direction)
        (wanted_gradient,) = torch.autograd.grad(expected, hidden, direction)
    compared = {"logits": (got, expected), "gradients": (gradient, wanted_gradient)}
    for what, (actual, target) in compared.items():
        difference = (actual - target).abs().max().item()
        largest = target.abs().max().item()
        if not difference <= PROBE_TOLERANCE * max(1.0, largest):
            _refuse(model, f"(largest difference of its {what}: {difference:.3g})")


def _refuse(model: Any, how: str) -> NoReturn:
    raise ValueError(
        f"policy: {type(model).__name__} changes its logits after the LM head {how}; not supported"
    )
