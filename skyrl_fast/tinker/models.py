"""Models of clients: how they are created, also from a checkpoint, described and unloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyrl_fast.tinker.checkpoints import SavedAdapter, TinkerPath
from skyrl_fast.tinker.futures import CallAnswer, CallFuture, OrderedCalls
from skyrl_fast.tinker.sessions import ServedModel
from skyrl_fast.tinker.shared import ADAMW, Json, SharedState, digest_of
from skyrl_fast.tinker.training import AdapterForm
from skyrl_fast.tinker.values import whole_number
from skyrl_fast.tinker.wire import RefusedCallError

NO_HEAD = (
    "adapters on the head (train_unembed) are not served: models train attention and MLP; pass "
    "train_unembed=False to say so"
)


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """What the server does for the calls that make, fill and end a model."""

    _shared: SharedState

    def create_model(self, body: Json) -> CallFuture:
        create = partial(self._create, body)
        return self._begin_model(body, create)

    def load_weights(self, body: Json) -> CallFuture:
        path = body.get("path")
        optimizer = bool(body.get("optimizer"))
        if body.get("session_id") is not None:
            return self._begin_model(body, partial(self._create_from, path, optimizer))

        def load(model: ServedModel) -> CallAnswer:
            parsed = TinkerPath.parse(str(path))
            saved = self._shared.store.find(parsed)
            adapter = model.get_adapter()
            if _form_of(saved) != adapter.form:
                raise RefusedCallError(
                    f"{parsed}: expected an adapter like the model's, {adapter.form}, got "
                    f"{_form_of(saved)}: create a training client from the checkpoint"
                )
            _check_optimizer(parsed, saved, optimizer)
            folder = self._shared.store.folder(parsed)
            self._shared.trainer.load_into(adapter, folder, optimizer=optimizer)
            return CallAnswer.of_json({"type": "load_weights", "path": str(parsed)})

        return self._shared.submit(body, load)

    def _begin_model(self, body: Json, create: Callable[[ServedModel], CallAnswer]) -> CallFuture:
        session = self._shared.sessions.find(body.get("session_id"))
        model_id = f"{session.name}:train:{int(body.get('model_seq_id') or 0)}"
        model = session.models.get(model_id)
        if model is None:
            model = session.models[model_id] = ServedModel(
                model_id=model_id,
                session_id=session.name,
                base_model=str(body.get("base_model") or self._shared.base.names[0]),
                calls=OrderedCalls(self._shared.futures, first=0),
                last_request=self._shared.store.now(),
                user_metadata=body.get("user_metadata") or {},
            )
        run = partial(self._shared.in_thread, partial(create, model))
        return model.calls.submit(0, digest_of(body), run)

    def _create(self, body: Json, model: ServedModel) -> CallAnswer:
        config = body.get("lora_config")
        self._shared.base.check_served(model.base_model)
        if not isinstance(config, Mapping):
            raise RefusedCallError("lora_config: expected one: only adapters are trained")
        check_adamw(body.get("optimizer_config"))
        if config.get("train_unembed", True) and self._shared.base.strict:
            raise RefusedCallError(f"lora_config.train_unembed: {NO_HEAD} (--strict)")
        rank = config.get("rank")
        seed = config.get("seed")
        if seed is not None:
            seed = whole_number("lora_config.seed", seed, None, None)
        form = AdapterForm(
            rank=whole_number("lora_config.rank", rank, None, None),
            train_attn=bool(config.get("train_attn", True)),
            train_mlp=bool(config.get("train_mlp", True)),
        )
        model.adapter = self._shared.trainer.create(form, seed=seed)
        model.form = form
        return CallAnswer.of_json({"type": "create_model", "model_id": model.model_id})

    def _create_from(self, path: Any, optimizer: bool, model: ServedModel) -> CallAnswer:
        parsed = TinkerPath.parse(str(path))
        saved = self._shared.store.find(parsed)
        self._shared.base.check_served(model.base_model)
        _check_optimizer(parsed, saved, optimizer)
        form = _form_of(saved)
        folder = self._shared.store.folder(parsed)
        model.adapter = self._shared.trainer.load(form, folder, optimizer=optimizer)
        model.form = form
        answer = {"type": "load_weights", "path": str(parsed), "model_id": model.model_id}
        return CallAnswer.of_json(answer)

    async def unload_model(self, body: Json) -> Json:
        model = self._shared.sessions.model(body.get("model_id"))
        del self._shared.sessions.find(model.session_id).models[model.model_id]
        await self.unload(model)
        return {"type": "unload_model", "model_id": model.model_id}

    def get_info(self, body: Json) -> Json:
        model = self._shared.sessions.model(body.get("model_id"))
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": model.base_model,
            "model_data": {
                "arch": self._shared.base.arch,
                "model_name": model.base_model,
                "tokenizer_id": self._shared.base.tokenizer,
            },
            "is_lora": True,
            "lora_rank": None if model.form is None else model.form.rank,
            "optimizer_config": ADAMW,
        }

    async def unload(self, model: ServedModel) -> None:
        """End a model's calls and free its adapter."""
        await model.calls.close(f"model {model.model_id} was unloaded")
        if model.adapter is not None:
            adapter = model.adapter
            model.adapter = None
            await self._shared.in_thread(partial(self._shared.trainer.remove, adapter))
        if self._shared.recorder is not None:
            self._shared.recorder.forget(model.model_id)


def _form_of(saved: SavedAdapter) -> AdapterForm:
    return AdapterForm(saved.rank, saved.train_attn, saved.train_mlp)


def _check_optimizer(path: TinkerPath, saved: SavedAdapter, wanted: bool) -> None:
    if wanted and not saved.has_optimizer:
        raise RefusedCallError(
            f"{path} has no optimizer: it was saved to sample from; save_state saves one"
        )


def check_adamw(config: Any) -> None:
    """Raise RefusedCallError for the settings of another optimizer."""
    kind = config.get("type", "adamw") if isinstance(config, Mapping) else "adamw"
    if kind != "adamw":
        raise RefusedCallError(f"optimizer_config: expected adamw, got {kind}, which is not served")
