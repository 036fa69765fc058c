"""Checkpoints and training runs as clients ask for them: records, lists, deletion."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.tinker.checkpoints import TinkerPath, check_run, checkpoint_record
from skyrl_fast.tinker.sessions import ServedModel
from skyrl_fast.tinker.shared import ADAMW, Json, SharedState
from skyrl_fast.tinker.snapshots import is_ephemeral
from skyrl_fast.tinker.wire import RefusedCallError


@dataclass(frozen=True, slots=True)
class CheckpointCalls:
    """What the server does for calls about what was saved."""

    _shared: SharedState

    def weights_info(self, body: Json) -> Json:
        saved = self._shared.store.find(TinkerPath.parse(str(body.get("tinker_path"))))
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
        found = self._shared.store.list(None if run is None else check_run(run))
        kept = [(path, saved) for path, saved in found if not is_ephemeral(path)]
        records = [checkpoint_record(self._shared.store, path, saved) for path, saved in kept]
        cursor = {"offset": 0, "limit": len(records), "total_count": len(records)}
        return {"checkpoints": records, "cursor": cursor}

    def delete_checkpoint(self, run: str, kind: str, name: str) -> None:
        path = TinkerPath.parse(f"tinker://{run}/{kind}/{name}")
        self._shared.store.find(path)
        self._shared.store.delete(path)

    def training_run(self, run: str) -> Json:
        """Return the record of a training run: a model, or what a model has saved."""
        checkpoints = self.list_checkpoints(run)["checkpoints"]
        saved = [one for _, one in self._shared.store.list(run)]
        try:
            model: ServedModel | None = self._shared.sessions.model(run)
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
