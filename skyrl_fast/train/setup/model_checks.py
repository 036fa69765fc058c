"""Whether a run's models are there and fit each other, and whether they fit into the memory."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from skyrl_fast.config import Config, InferenceEngineConfig
from skyrl_fast.config.distillation import SETTING as DISTILLATION
from skyrl_fast.config.features import check_features
from skyrl_fast.config.model_folder import model_folder
from skyrl_fast.ops._backend import main_memory
from skyrl_fast.train.memory.activations import UnmeasurableError
from skyrl_fast.train.memory.device_plan import MemoryPlan
from skyrl_fast.train.memory.gpus import HERE, Gpus
from skyrl_fast.train.memory.plan import (
    gpu_memory,
    memory_in_use,
    offload_moments,
    plan_with_remedies,
    settle_ranks,
)
from skyrl_fast.train.model.loading import load_tokenizer
from skyrl_fast.train.model.models import find_device, model_path, uses_reference
from skyrl_fast.train.placement import engine_placement
from skyrl_fast.train.setup.errors import SetupError

logger = logging.getLogger(__name__)


PLANNED_BYTES = 64 << 20  # weights of a model for which a plan on a CPU is worth its seconds
UNPLANNED_SHARE = 0.5  # gpu_memory_utilization next to a trainer whose memory is unknown


def check_models(config: Config, checkpoint: Path | None) -> Path:
    """Return the policy's folder; of a hub name, all of the run's models are downloaded.

    Raises:
        ValueError: a model is missing, or has another vocabulary than the policy.
    """
    trainer = config.trainer
    if uses_reference(config):
        others = [("ref", trainer.ref.model.path)]
    else:
        others = []
    if checkpoint is None:
        others.append(("critic", trainer.critic.model.path))
    others = [(f"trainer.{name}.model.path", path) for name, path in others]
    for source, teacher in trainer.algorithm.distillation.started_models.items():
        others.append((f"{DISTILLATION}.teachers.{source}", teacher))
    _check_teachers_memory(config)
    folder = model_folder(model_path(config, checkpoint))
    for setting, path in others:
        if path is not None:
            check_vocabulary(folder, model_folder(path, setting=setting), setting)
    return folder


def _check_teachers_memory(config: Config) -> None:
    """Raise ValueError for a teacher whose share of a GPU is not given: the plan leaves none."""
    settings = config.trainer.algorithm.distillation
    if not settings.started_models or find_device(config.trainer.device).type == "cpu":
        return
    if "gpu_memory_utilization" not in settings.engine_init_kwargs:
        raise ValueError(
            f"{DISTILLATION}.engine_init_kwargs: expected gpu_memory_utilization, the share of a "
            "GPU that each teacher of the run takes (device_ids: of which one), or a teacher by "
            "the address of a server, got none"
        )


def check_vocabulary(policy: Path, other: Path, setting: str) -> None:
    """Raise ValueError if a model reads the policy's token ids as other tokens, or has too few.

    Models without a tokenizer are compared by their number of ids.
    """
    ids = _token_ids(policy)
    others = _token_ids(other)
    if ids is None or policy == other:
        return
    size = _vocabulary_size(other)
    if size is not None and size <= max(ids.values(), default=0):
        raise ValueError(
            f"{setting}: expected a model with the policy's vocabulary of {len(ids):,} ids, got "
            f"{size:,} in {other}"
        )
    names = {number: token for token, number in (others or {}).items()}
    for token, number in ids.items():
        known = (others or {}).get(token, number)
        if known != number or names.get(number, token) != token:
            raise ValueError(
                f"{setting}: expected a model with the policy's tokenizer, but in {other} id "
                f"{number} is {names.get(number)!r}, not {token!r}"
            )


def _token_ids(folder: Path) -> dict[str, int] | None:
    files = ("tokenizer*", "vocab*", "*.model")
    if not any(next(folder.glob(pattern), None) for pattern in files):
        return None  # transformers makes an empty one for some types of models
    try:
        found: dict[str, int] = load_tokenizer(str(folder)).get_vocab()
    except (ImportError, KeyError, ValueError):  # none, or none that transformers knows
        return None
    return found


def _vocabulary_size(folder: Path) -> int | None:
    values = json.loads((folder / "config.json").read_text())
    size = values.get("vocab_size") or (values.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def plan_run_memory(
    config: Config,
    checkpoint: Path | None,
    *,
    with_engine: bool,
    gpus: Gpus = HERE,
    memory: int | None = None,
) -> MemoryPlan | None:
    """Return the plan of a run on GPUs, and place the engine by it; None on a CPU.

    There a run that needs more than the main memory is warned of: how full passes become, the plan
    does not know.

    Also None, with a warning, for a model that cannot be measured.

    Args:
        with_engine: whether the run has engines.
        gpus: of the machine.
        memory: bytes of main memory; None: this machine's.

    Raises:
        SetupError: it does not fit; the message is the plan. Or there is no GPU for the engine's
            settings.
    """
    engine = config.generator.inference_engine
    num_gpus = len(gpus.sizes)
    placement = config.trainer.placement
    if find_device(config.trainer.device, has_gpu=num_gpus > 0).type == "cpu":
        _refuse_gpu_settings(engine)
        placement.policy_num_gpus_per_node = placement.ranks_per_node
        planned = _with_folders(config, checkpoint)
        _warn_of_main_memory(planned, with_engine, memory or main_memory())
        return None
    if placement.policy_num_gpus_per_node is None:
        _settle_ranks(config, checkpoint, gpus, with_engine)
    capacity = gpu_memory(config, with_engine=with_engine, gpus=gpus)
    assert capacity is not None
    planned = _with_folders(config, checkpoint)
    in_process = with_engine and config.engine_place.is_here
    if in_process:
        engines = engine_placement(config, num_gpus)
        if engines.weight_sync == "ipc":
            fault = gpus.ipc_fault()
            if fault and engine.weight_sync_backend == "ipc":
                raise SetupError(
                    "generator.inference_engine.weight_sync_backend=ipc: CUDA does not share "
                    f"memory between processes here: {fault}. Set it to file"
                )
            if fault:
                logger.warning(
                    "weight_sync_backend=auto: weights go to the engine by file, as CUDA does not "
                    "share memory between processes here: %s",
                    fault,
                )
                engines = replace(engines, weight_sync="file")
                planned.generator.inference_engine.weight_sync_backend = "file"
        nodes = placement.policy_num_nodes if config.spreads_engines else 1
        engine.num_engines = nodes * len(engines.engines)
        engine.gpu_ids = list(engines.gpu_ids)
        engine.enable_sleep_mode = engines.sleeps
        engine.weight_sync_backend = engines.weight_sync
    try:
        plan = plan_with_remedies(
            planned,
            capacity=capacity,
            in_use=memory_in_use(config, with_engine=with_engine, gpus=gpus),
            num_gpus=num_gpus,
            with_engine=with_engine,
        )
    except UnmeasurableError as error:
        if in_process and engines.shared and engine.gpu_memory_utilization is None:
            engine.gpu_memory_utilization = UNPLANNED_SHARE
        logger.warning(
            "no memory plan: %s; gpu_memory_utilization=%s", error, engine.gpu_memory_utilization
        )
        return None
    if not plan.fits:
        raise SetupError(f"the run needs more memory than its GPUs have:\n{plan}")
    if plan.offloads_moments:
        offload_moments(config)
    if plan.offloads_weights:
        placement.offload_weights = True
        # They are not on the GPU by then; those of several ranks are until all are gathered.
        if in_process and engines.weight_sync == "ipc" and placement.num_ranks == 1:
            engine.weight_sync_backend = "file"
    if plan.sends_files and in_process:
        engine.weight_sync_backend = "file"
    if plan.engine_share is not None:
        engine.gpu_memory_utilization = plan.engine_share
    return plan


def _settle_ranks(config: Config, checkpoint: Path | None, gpus: Gpus, with_engine: bool) -> None:
    """Choose the number of ranks by the plan; all GPUs are theirs or the engines'."""
    planned = _with_folders(config, checkpoint)
    placement = planned.trainer.placement
    num_gpus = len(gpus.sizes)
    placement.policy_num_gpus_per_node = num_gpus  # of all GPUs the fullest counts
    in_use = memory_in_use(planned, with_engine=False, gpus=gpus)
    placement.policy_num_gpus_per_node = None
    with suppress(UnmeasurableError):  # it is the first choice then
        settle_ranks(
            planned,
            capacity=min(gpus.sizes),
            in_use=in_use,
            num_gpus=num_gpus,
            with_engine=with_engine,
        )
    config.trainer.placement.policy_num_gpus_per_node = placement.policy_num_gpus_per_node
    check_features(config)


def _with_folders(config: Config, checkpoint: Path | None) -> Config:
    """Return the settings with folders where they may have null; the run keeps its settings."""
    planned = deepcopy(config)
    if not config.shares_reference:
        planned.trainer.ref.model.path = config.trainer.ref.model.path or model_path(config, None)
    planned.trainer.policy.model.path = model_path(config, checkpoint)
    return planned


def _warn_of_main_memory(config: Config, with_engine: bool, memory: int) -> None:
    """Warn if a run on the CPU needs more memory than the machine has, with what would fit."""
    folder = model_folder(str(config.trainer.policy.model.path))
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if weights < PLANNED_BYTES:
        return
    config.trainer.device = "cpu"
    try:
        plan = plan_with_remedies(config, capacity=memory, with_engine=with_engine)
    except UnmeasurableError:  # as on a GPU, but nothing depends on this plan
        return
    if not plan.fits:
        logger.warning("the run may need more memory than this machine has:\n%s", plan)


def _refuse_gpu_settings(engine: InferenceEngineConfig) -> None:
    for name, asked, wanted in (
        ("enable_sleep_mode", engine.enable_sleep_mode is True, "null or false"),
        (
            "weight_sync_backend",
            engine.weight_sync_backend in ("ipc", "nccl"),
            "auto, gloo or file",
        ),
    ):
        if asked:
            raise SetupError(
                f"generator.inference_engine.{name}: expected {wanted}, as the trainer computes on "
                f"the CPU, got {str(getattr(engine, name)).lower()}"
            )
