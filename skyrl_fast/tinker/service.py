"""What the server does for each request of the SDK; `app` has the paths.

Training runs in one thread, sampling in the engine, and this in the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from skyrl_fast.gateway.messages import ApiError
from skyrl_fast.tinker.checkpoints import (
    SAMPLER,
    TRAINING,
    CheckpointStore,
    SavedAdapter,
    TinkerPath,
    check_name,
    check_run,
    checkpoint_record,
)
from skyrl_fast.tinker.futures import SAMPLING, CallAnswer, CallFuture, Futures, OrderedCalls
from skyrl_fast.tinker.recording import DatumRecorder
from skyrl_fast.tinker.sampling import (
    SampleCall,
    Snapshot,
    SnapshotSampler,
    read_sample_call,
)
from skyrl_fast.tinker.sessions import ClientSessions, SamplingSession, ServedModel
from skyrl_fast.tinker.training import AdapterForm, AdapterTrainer, TrainedAdapter
from skyrl_fast.tinker.values import number, whole_number
from skyrl_fast.tinker.wire import (
    RefusedCallError,
    Samples,
    parse_forward_backward,
    read_forward_backward,
    write_loss_outputs,
    write_samples,
)
from skyrl_fast.train.model.optimizer import StepNumbers

log = logging.getLogger(__name__)
T = TypeVar("T")
Json = dict[str, Any]

TICK_SECONDS = 5.0  # between two looks at silent sessions and old answers
ADAMW = {"type": "adamw"}
NO_HEAD = (
    "adapters on the head (train_unembed) are not served: models train attention and MLP; pass "
    "train_unembed=False to say so"
)


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The model that is served.

    Args:
        names: by which clients ask for it, the first one in messages.
        tokenizer: folder or hub name.
        arch: name of the model's class.
        max_length: the most tokens of a sequence.
        strict: whether adapters are refused that lack what a client asked for.
    """

    names: tuple[str, ...]
    tokenizer: str
    arch: str
    max_length: int
    strict: bool = False


class TinkerService:
    """Sessions, models, samplers and their calls.

    Args:
        recorder: keeps what was trained, for the viewer; None: nothing is kept.
        clock: returns seconds.
    """

    def __init__(
        self,
        base: ServedBase,
        trainer: AdapterTrainer,
        sampler: SnapshotSampler,
        store: CheckpointStore,
        *,
        recorder: DatumRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base = base
        self.futures = Futures(secrets.token_hex(4), clock)
        self.sessions = ClientSessions(clock)
        self._trainer = trainer
        self._sampler = sampler
        self._store = store
        self._recorder = recorder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-train")
        self._snapshot_numbers = itertools.count(1)
        self._snapshots: dict[tuple[str, str], Snapshot] = {}
        self._sampling: dict[str, asyncio.Task[None]] = {}
        self._warnings = [NO_HEAD]

    async def start(self) -> None:
        """Start the sampler."""
        await self._sampler.start()

    async def stop_sampler(self) -> None:
        await self._sampler.close()

    async def run(self) -> None:
        """End silent sessions and drop old answers, until it is cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await self.tick()

    async def tick(self) -> None:
        for name in self.sessions.silent():
            log.warning("session %s: no heartbeat: its models are unloaded", name)
            await self.end_session(name)
        self.futures.drop_old()

    async def close(self) -> None:
        for name in self.sessions.names():
            await self.end_session(name)
        for task in list(self._sampling.values()):
            task.cancel()
        self._thread.shutdown()
        if self._recorder is not None:
            self._recorder.close()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # --- sessions

    def create_session(self, body: Json) -> Json:
        session = self.sessions.open(str(body.get("sdk_version", "")), self._store.now())
        return {"type": "create_session", "session_id": session.name}

    def next_warning(self) -> str | None:
        """Return what the first client of this server is told, and no later one."""
        if not self._warnings:
            return None
        warning = self._warnings.pop()
        log.warning("%s", warning)
        return warning

    def heartbeat(self, body: Json) -> Json:
        self.sessions.hear(body.get("session_id"))
        return {"type": "session_heartbeat"}

    async def end_session(self, name: str) -> None:
        """Unload a session's models, and forget its samplers; what it saved under a name stays."""
        session = self.sessions.remove(name)
        if session is None:
            return
        for model in session.models.values():
            await self._unload(model)
        for sampler in session.samplers.values():
            self._forget(sampler)

    def _forget(self, sampler: SamplingSession) -> None:
        for future in sampler.accepted.values():
            self.cancel(future.request_id)
        if sampler.path is not None and _is_ephemeral(sampler.path):
            self._store.delete(sampler.path)
        for key in [key for key, one in self._snapshots.items() if one is sampler.snapshot]:
            if _is_ephemeral(TinkerPath.parse(key[0])):
                del self._snapshots[key]

    async def _unload(self, model: ServedModel) -> None:
        await model.calls.close(f"model {model.model_id} was unloaded")
        if model.adapter is not None:
            adapter = model.adapter
            model.adapter = None
            await self._in_thread(partial(self._trainer.remove, adapter))
        if self._recorder is not None:
            self._recorder.forget(model.model_id)

    def capabilities(self) -> Json:
        common = {
            "max_context_length": self.base.max_length,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [{"model_name": name, **common} for name in self.base.names]}

    # --- models

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
            saved = self._store.find(parsed)
            adapter = model.get_adapter()
            if _form_of(saved) != adapter.form:
                raise RefusedCallError(
                    f"{parsed}: expected an adapter like the model's, {adapter.form}, got "
                    f"{_form_of(saved)}: create a training client from the checkpoint"
                )
            _check_optimizer(parsed, saved, optimizer)
            folder = self._store.folder(parsed)
            self._trainer.load_into(adapter, folder, optimizer=optimizer)
            return CallAnswer.of_json({"type": "load_weights", "path": str(parsed)})

        return self._submit(body, load)

    def _begin_model(self, body: Json, create: Callable[[ServedModel], CallAnswer]) -> CallFuture:
        session = self.sessions.find(body.get("session_id"))
        model_id = f"{session.name}:train:{int(body.get('model_seq_id') or 0)}"
        model = session.models.get(model_id)
        if model is None:
            model = session.models[model_id] = ServedModel(
                model_id=model_id,
                session_id=session.name,
                base_model=str(body.get("base_model") or self.base.names[0]),
                calls=OrderedCalls(self.futures, first=0),
                last_request=self._store.now(),
                user_metadata=body.get("user_metadata") or {},
            )
        run = partial(self._in_thread, partial(create, model))
        return model.calls.submit(0, _digest(body), run)

    def _create(self, body: Json, model: ServedModel) -> CallAnswer:
        config = body.get("lora_config")
        self.check_base(model.base_model)
        if not isinstance(config, Mapping):
            raise RefusedCallError("lora_config: expected one: only adapters are trained")
        _check_adamw(body.get("optimizer_config"))
        if config.get("train_unembed", True) and self.base.strict:
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
        model.adapter = self._trainer.create(form, seed=seed)
        model.form = form
        return CallAnswer.of_json({"type": "create_model", "model_id": model.model_id})

    def _create_from(self, path: Any, optimizer: bool, model: ServedModel) -> CallAnswer:
        parsed = TinkerPath.parse(str(path))
        saved = self._store.find(parsed)
        self.check_base(model.base_model)
        _check_optimizer(parsed, saved, optimizer)
        form = _form_of(saved)
        folder = self._store.folder(parsed)
        model.adapter = self._trainer.load(form, folder, optimizer=optimizer)
        model.form = form
        answer = {"type": "load_weights", "path": str(parsed), "model_id": model.model_id}
        return CallAnswer.of_json(answer)

    def check_base(self, name: str) -> None:
        """Raise RefusedCallError for another base model than the served one."""
        if name not in (*self.base.names, self.base.tokenizer):
            known = ", ".join(self.base.names)
            raise RefusedCallError(
                f"base_model: this server has {known}, got {name!r:.200}: start one with it, or "
                "give this model its name, too, with --name"
            )

    async def unload_model(self, body: Json) -> Json:
        model = self.sessions.model(body.get("model_id"))
        del self.sessions.find(model.session_id).models[model.model_id]
        await self._unload(model)
        return {"type": "unload_model", "model_id": model.model_id}

    def get_info(self, body: Json) -> Json:
        model = self.sessions.model(body.get("model_id"))
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": model.base_model,
            "model_data": {
                "arch": self.base.arch,
                "model_name": model.base_model,
                "tokenizer_id": self.base.tokenizer,
            },
            "is_lora": True,
            "lora_rank": None if model.form is None else model.form.rank,
            "optimizer_config": ADAMW,
        }

    # --- calls of a model

    def _submit(
        self, body: Json, work: Callable[[ServedModel], CallAnswer], digest: bytes | None = None
    ) -> CallFuture:
        model = self.sessions.model(body.get("model_id"))
        model.last_request = self._store.now()
        run = partial(self._in_thread, partial(work, model))
        seq_id = body.get("seq_id")
        if seq_id is not None:
            seq_id = whole_number("seq_id", seq_id, 0, None)
        return model.calls.submit(seq_id, digest or _digest(body), run)

    def forward_backward(self, content: bytes) -> CallFuture:
        message = parse_forward_backward(content)

        def compute(model: ServedModel) -> CallAnswer:
            call = read_forward_backward(message)
            outputs = self._trainer.forward_backward(model.get_adapter(), call)
            if self._recorder is not None:
                self._recorder.add(model.model_id, call, outputs)
            return CallAnswer.of_message(write_loss_outputs(outputs))

        address = {"model_id": message.model_id, "seq_id": message.seq_id or None}
        return self._submit(address, compute, hashlib.sha256(content).digest())

    def optim_step(self, body: Json) -> CallFuture:
        def step(model: ServedModel) -> CallAnswer:
            numbers = read_step_numbers(body)
            adapter = model.get_adapter()
            metrics = self._trainer.optim_step(adapter, numbers)
            if self._recorder is not None:
                self._recorder.step(model.model_id, adapter.num_steps)
            return CallAnswer.of_json({"metrics": metrics})

        return self._submit(body, step)

    def save_weights(self, body: Json) -> CallFuture:
        def save(model: ServedModel) -> CallAnswer:
            name = body.get("path") or f"seq_{body.get('seq_id')}"
            path = TinkerPath(model.model_id, TRAINING, check_name(str(name)))
            self._save(model, path, body, overwrite=bool(body.get("overwrite")))
            return CallAnswer.of_json({"type": "save_weights", "path": str(path)})

        return self._submit(body, save)

    def save_weights_for_sampler(self, body: Json) -> CallFuture:
        def save(model: ServedModel) -> CallAnswer:
            named = body.get("path")
            name = check_name(str(named)) if named else f"{EPHEMERAL}{body.get('seq_id')}"
            path = TinkerPath(model.model_id, SAMPLER, name)
            self._save(model, path, body, overwrite=not named)
            if named:
                answer = {"type": "save_weights_for_sampler", "path": str(path)}
                return CallAnswer.of_json(answer)
            sampler = self._new_sampler(model.session_id, body, model.base_model)
            sampler.path = path
            snapshot = self._snapshot(path, self._store.find(path))
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

        return self._submit(body, save)

    def _save(self, model: ServedModel, path: TinkerPath, body: Json, *, overwrite: bool) -> None:
        adapter: TrainedAdapter = model.get_adapter()
        with_optimizer = path.kind == TRAINING
        saved = SavedAdapter(
            base_model=model.base_model,
            rank=adapter.form.rank,
            train_attn=adapter.form.train_attn,
            train_mlp=adapter.form.train_mlp,
            time=self._store.now(),
            expires_at=self._store.expiry(body.get("ttl_seconds")),
            has_optimizer=with_optimizer,
            user_metadata=body.get("user_metadata") or {},
        )
        with self._store.writing(path, saved, overwrite=overwrite) as folder:
            self._trainer.save(adapter, folder, optimizer=with_optimizer)

    # --- sampling

    def create_sampling_session(self, body: Json) -> Json:
        session = self.sessions.find(body.get("session_id"))
        path = body.get("model_path")
        if path is None:
            base_model = str(body.get("base_model"))
            self.check_base(base_model)
            sampler = self._new_sampler(session.name, body, base_model)
        else:
            parsed = TinkerPath.parse(str(path))
            saved = self._store.find(parsed)
            sampler = self._new_sampler(session.name, body, saved.base_model)
            sampler.path = parsed
            sampler.saved_at = saved.time
            sampler.snapshot = self._snapshot(parsed, saved)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.name}

    def _new_sampler(self, session: str, body: Json, base_model: str) -> SamplingSession:
        name = f"{session}:sample:{int(body.get('sampling_session_seq_id') or 0)}"
        samplers = self.sessions.find(session).samplers
        if name not in samplers:  # else the call was sent again
            samplers[name] = SamplingSession(name, session, base_model)
        return samplers[name]

    def _snapshot(self, path: TinkerPath, saved: SavedAdapter) -> Snapshot:
        key = (str(path), saved.time)
        if key not in self._snapshots:
            count = next(self._snapshot_numbers)
            folder = self._store.folder(path)
            self._snapshots[key] = Snapshot(f"snapshot-{count}", count, folder)
        return self._snapshots[key]

    def sample(self, body: Json) -> CallFuture:
        sampler = self._sampler_of(body)
        seq_id = body.get("seq_id")
        digest = _digest(body)
        if seq_id is not None and (known := sampler.accepted.get(seq_id)) is not None:
            if known.digest != digest:
                raise RefusedCallError(f"seq_id: {seq_id} was another call of this sampler")
            return known
        future = self.futures.new(SAMPLING, digest)
        count = body.get("num_samples", 1)
        ids = [f"{future.request_id}-{n}" for n in range(count if isinstance(count, int) else 1)]
        future.extra["sample_sequence_ids"] = ids
        if seq_id is not None:
            sampler.accepted[seq_id] = future
        task = asyncio.create_task(self._answer_sample(sampler, body, future))
        self._sampling[future.request_id] = task
        task.add_done_callback(lambda _: self._sampling.pop(future.request_id, None))
        return future

    def _sampler_of(self, body: Json) -> SamplingSession:
        if body.get("sampling_session_id") is not None:
            return self.sessions.sampler(body["sampling_session_id"])
        sampler = SamplingSession("", "", self.base.names[0])
        if body.get("model_path") is None:
            self.check_base(str(body.get("base_model")))
            return sampler
        sampler.path = TinkerPath.parse(str(body["model_path"]))
        saved = self._store.find(sampler.path)
        sampler.saved_at = saved.time
        sampler.snapshot = self._snapshot(sampler.path, saved)
        return sampler

    async def _answer_sample(
        self, sampler: SamplingSession, body: Json, future: CallFuture
    ) -> None:
        try:
            call: SampleCall = read_sample_call(
                body, vocab_size=self._trainer.vocab_size, max_length=self.base.max_length
            )
            self._check_saved(sampler)
            snapshot = sampler.current_snapshot()
            samples = await self.sample_from(call, snapshot, sampler.name)
            answer = CallAnswer.of_message(write_samples(samples))
        except asyncio.CancelledError:
            error = RefusedCallError("the sample was cancelled, or its session has ended")
            self.futures.finish(future, CallAnswer.of_failure(error))
            raise
        except Exception as error:
            answer = CallAnswer.of_failure(error)
        self.futures.finish(future, answer)

    async def sample_from(
        self, call: SampleCall, snapshot: Snapshot | None, client: str = ""
    ) -> Samples:
        """Return answers of the base model or of a snapshot.

        Args:
            client: calls of equal names share cached keys and values.
        """
        weights = "base" if snapshot is None else snapshot.name
        return await self._sampler.sample(call, snapshot, f"{weights}-{client}")

    def find_snapshot(self, name: str) -> Snapshot | None:
        """Return the snapshot of a `tinker://` path; None for a name of the base model.

        Raises:
            ApiError: there is none, with status 404.
        """
        if name in (*self.base.names, self.base.tokenizer):
            return None
        try:
            path = TinkerPath.parse(name)
            return self._snapshot(path, self._store.find(path))
        except RefusedCallError as error:
            known = ", ".join(self.base.names)
            raise ApiError(
                404,
                f"The model `{name:.200}` does not exist here; known: {known}, and what clients "
                f"have saved, as GET /v1/models lists it. {error}",
                code="model_not_found",
            ) from None

    def model_names(self) -> list[str]:
        """Return the names of the base model, and the paths of what clients have saved."""
        saved = [path for path, _ in self._store.list() if not _is_ephemeral(path)]
        return [*self.base.names, *map(str, saved)]

    def _check_saved(self, sampler: SamplingSession) -> None:
        """Raise RefusedCallError if a sampler's checkpoint was deleted or replaced."""
        if sampler.path is None or _is_ephemeral(sampler.path):
            return
        if self._store.find(sampler.path).time != sampler.saved_at:
            raise RefusedCallError(
                f"{sampler.path} was saved again since this sampling client was created: create "
                "another one"
            )

    def cancel(self, request_id: str) -> None:
        if (task := self._sampling.get(request_id)) is not None:
            task.cancel()

    def get_sampler(self, name: str) -> Json:
        sampler = self.sessions.sampler(name)
        path = None if sampler.path is None else str(sampler.path)
        return {"sampler_id": name, "base_model": sampler.base_model, "model_path": path}

    # --- checkpoints

    def weights_info(self, body: Json) -> Json:
        saved = self._store.find(TinkerPath.parse(str(body.get("tinker_path"))))
        return {
            "base_model": saved.base_model,
            "optimizer_config": ADAMW,
            "is_lora": True,
            "lora_rank": saved.rank,
            "train_attn": saved.train_attn,
            "train_mlp": saved.train_mlp,
            "train_unembed": False,
        }

    def list_checkpoints(self, run: str | None = None) -> Json:
        found = self._store.list(None if run is None else check_run(run))
        kept = [(path, saved) for path, saved in found if not _is_ephemeral(path)]
        records = [checkpoint_record(self._store, path, saved) for path, saved in kept]
        cursor = {"offset": 0, "limit": len(records), "total_count": len(records)}
        return {"checkpoints": records, "cursor": cursor}

    def delete_checkpoint(self, run: str, kind: str, name: str) -> None:
        path = TinkerPath.parse(f"tinker://{run}/{kind}/{name}")
        self._store.find(path)
        self._store.delete(path)

    def training_run(self, run: str) -> Json:
        """Return the record of a training run: a model, or what a model has saved."""
        checkpoints = self.list_checkpoints(run)["checkpoints"]
        saved = [one for _, one in self._store.list(run)]
        try:
            model: ServedModel | None = self.sessions.model(run)
        except RefusedCallError:
            if not saved:
                raise
            model = None
        by_type = {one["checkpoint_type"]: one for one in checkpoints}
        known = saved[-1] if model is None else model
        rank = saved[-1].rank if model is None or model.form is None else model.form.rank
        return {
            "training_run_id": run,
            "base_model": known.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": rank,
            "last_request_time": saved[-1].time if model is None else model.last_request,
            "last_checkpoint": by_type.get("training"),
            "last_sampler_checkpoint": by_type.get("sampler"),
            "user_metadata": None if model is None else model.user_metadata or None,
        }


EPHEMERAL = "_ephemeral-"


def _is_ephemeral(path: TinkerPath) -> bool:
    return path.name.startswith(EPHEMERAL)


def _form_of(saved: SavedAdapter) -> AdapterForm:
    return AdapterForm(saved.rank, saved.train_attn, saved.train_mlp)


def _check_optimizer(path: TinkerPath, saved: SavedAdapter, wanted: bool) -> None:
    if wanted and not saved.has_optimizer:
        raise RefusedCallError(
            f"{path} has no optimizer: it was saved to sample from; save_state saves one"
        )


def _check_adamw(config: Any) -> None:
    kind = config.get("type", "adamw") if isinstance(config, Mapping) else "adamw"
    if kind != "adamw":
        raise RefusedCallError(f"optimizer_config: expected adamw, got {kind}, which is not served")


def read_step_numbers(body: Json) -> StepNumbers:
    """Return AdamW's numbers of a call of `optim_step`.

    Raises:
        RefusedCallError: another optimizer, or a number out of range.
    """
    params = body.get("adam_params")
    if not isinstance(params, Mapping):
        _check_adamw(body.get("optimizer_params"))
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


def _digest(body: Json) -> bytes:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
