"""Calls of a model that is trained: gradients, optimizer steps, and what is saved of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_fast.tinker.checkpoints import (
    SAMPLER,
    TRAINING,
    SavedAdapter,
    TinkerPath,
    check_name,
)
from skyrl_fast.tinker.futures import CallAnswer, CallFuture
from skyrl_fast.tinker.models import check_adamw
from skyrl_fast.tinker.sampling_calls import sampler_number
from skyrl_fast.tinker.sessions import ServedModel
from skyrl_fast.tinker.shared import Json, SharedState
from skyrl_fast.tinker.snapshots import EPHEMERAL
from skyrl_fast.tinker.training import TrainedAdapter
from skyrl_fast.tinker.values import number
from skyrl_fast.tinker.wire import (
    RefusedCallError,
    parse_forward_backward,
    read_forward_backward,
    write_loss_outputs,
)
from skyrl_fast.train.model.optimizer import StepNumbers


@dataclass(frozen=True, slots=True)
class TrainingCalls:
    """What the server does for the calls of a model that is there."""

    _shared: SharedState

    def forward_backward(self, content: bytes) -> CallFuture:
        message = parse_forward_backward(content)

        def compute(model: ServedModel) -> CallAnswer:
            call = read_forward_backward(message)
            outputs = self._shared.trainer.forward_backward(model.get_adapter(), call)
            if self._shared.recorder is not None:
                self._shared.recorder.add(model.model_id, call, outputs)
            return CallAnswer.of_message(write_loss_outputs(outputs))

        address = {"model_id": message.model_id, "seq_id": message.seq_id or None}
        return self._shared.submit(address, compute, hashlib.sha256(content).digest())

    def optim_step(self, body: Json) -> CallFuture:
        def step(model: ServedModel) -> CallAnswer:
            numbers = read_step_numbers(body)
            adapter = model.get_adapter()
            metrics = self._shared.trainer.optim_step(adapter, numbers)
            if self._shared.recorder is not None:
                self._shared.recorder.step(model.model_id, adapter.num_steps)
            return CallAnswer.of_json({"metrics": metrics})

        return self._shared.submit(body, step)

    def save_weights(self, body: Json) -> CallFuture:
        def save(model: ServedModel) -> CallAnswer:
            name = body.get("path") or f"seq_{body.get('seq_id')}"
            path = TinkerPath(model.model_id, TRAINING, check_name(str(name)))
            self._save(model, path, body, overwrite=bool(body.get("overwrite")))
            return CallAnswer.of_json({"type": "save_weights", "path": str(path)})

        return self._shared.submit(body, save)

    def save_weights_for_sampler(self, body: Json) -> CallFuture:
        def save(model: ServedModel) -> CallAnswer:
            named = body.get("path")
            name = check_name(str(named)) if named else f"{EPHEMERAL}{body.get('seq_id')}"
            path = TinkerPath(model.model_id, SAMPLER, name)
            self._save(model, path, body, overwrite=not named)
            if named:
                answer = {"type": "save_weights_for_sampler", "path": str(path)}
                return CallAnswer.of_json(answer)
            sampler = self._shared.sessions.open_sampler(
                model.session_id, sampler_number(body), model.base_model
            )
            sampler.path = path
            snapshot = self._shared.snapshots.get(path, self._shared.store.find(path))
            if body.get("kind", "snapshot") == "inflight":
                model.inflight = snapshot
                sampler.model = model
            else:
                sampler.snapshot = snapshot
            answer = {
                "type": "save_weights_for_sampler",
                "sampling_session_id": sampler.name,
            }
            return CallAnswer.of_json(answer)

        return self._shared.submit(body, save)

    def _save(self, model: ServedModel, path: TinkerPath, body: Json, *, overwrite: bool) -> None:
        adapter: TrainedAdapter = model.get_adapter()
        with_optimizer = path.kind == TRAINING
        saved = SavedAdapter(
            base_model=model.base_model,
            rank=adapter.form.rank,
            train_attn=adapter.form.train_attn,
            train_mlp=adapter.form.train_mlp,
            time=self._shared.store.now(),
            expires_at=self._shared.store.expiry(body.get("ttl_seconds")),
            has_optimizer=with_optimizer,
            user_metadata=body.get("user_metadata") or {},
        )
        with self._shared.store.writing(path, saved, overwrite=overwrite) as folder:
            self._shared.trainer.save(adapter, folder, optimizer=with_optimizer)


def read_step_numbers(body: Json) -> StepNumbers:
    """Return AdamW's numbers of a call of `optim_step`.

    Raises:
        RefusedCallError: another optimizer, or a number out of range.
    """
    params = body.get("adam_params")
    if not isinstance(params, Mapping):
        check_adamw(body.get("optimizer_params"))
        raise RefusedCallError("adam_params: expected AdamW's numbers, got none")

    def read(name: str, default: float, *, below: float | None = None) -> float:
        value = params.get(name, default)
        return number(f"adam_params.{name}", value, 0.0, below=below)

    return StepNumbers(
        lr=read("learning_rate", 1e-4),
        betas=(read("beta1", 0.9, below=1.0), read("beta2", 0.95, below=1.0)),
        eps=read("eps", 1e-12),
        weight_decay=read("weight_decay", 0.0),
        max_grad_norm=read("grad_clip_norm", 0.0),
    )
