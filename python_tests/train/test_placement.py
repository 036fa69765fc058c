"""The GPUs of the run's own engine, and whether it sleeps; the nodes of a cluster run."""

from pathlib import Path
from typing import Any

import pytest
from _features import BASE, ENGINE

from skyrl_fast.config import Config, ConfigError, as_config, check_config
from skyrl_fast.train import cluster
from skyrl_fast.train.parallel.ranks import RankError
from skyrl_fast.train.parallel.ray_ranks import EnginesOfNode, colocated_bundles
from skyrl_fast.train.placement import (
    EnginePlacement,
    draw_nodes,
    engine_placement,
    node_placement,
    rank_choices,
)


def config_of(ranks: int, *, parallel: int = 1, **engine: Any) -> Config:
    config = Config()
    config.trainer.placement.policy_num_gpus_per_node = ranks
    settings = config.generator.inference_engine
    settings.tensor_parallel_size = parallel
    for name, value in engine.items():
        setattr(settings, name, value)
    return config


@pytest.mark.parametrize(
    ("ranks", "parallel", "num_gpus", "expected"),
    [
        (1, 1, 1, EnginePlacement(((0,),), (0,), True, "ipc")),
        (1, 1, 2, EnginePlacement(((1,),), (), False, "nccl")),
        (1, 1, 8, EnginePlacement(((7,),), (), False, "nccl")),
        (1, 2, 4, EnginePlacement(((2, 3),), (), False, "nccl")),
        (2, 1, 4, EnginePlacement(((2,), (3,)), (), False, "file")),
        (6, 1, 8, EnginePlacement(((6,), (7,)), (), False, "file")),
        (3, 1, 4, EnginePlacement(((3,),), (), False, "file")),
        (2, 1, 2, EnginePlacement(((0,), (1,)), (0, 1), True, "ipc")),
        (4, 2, 4, EnginePlacement(((0, 1), (2, 3)), (0, 1, 2, 3), True, "ipc")),
        (2, 2, 4, EnginePlacement(((2, 3),), (), False, "file")),
        (3, 2, 4, EnginePlacement(((0, 1),), (0, 1), True, "ipc")),
        (1, 2, 2, EnginePlacement(((0, 1),), (0,), True, "ipc")),
    ],
)
@pytest.mark.spec("memory.engine-gpus")
def test_an_engine_for_each_rank_on_spare_gpus_or_on_its_own(
    ranks: int, parallel: int, num_gpus: int, expected: EnginePlacement
) -> None:
    assert engine_placement(config_of(ranks, parallel=parallel), num_gpus) == expected


def test_settings_take_precedence() -> None:
    shared = engine_placement(config_of(2, gpu_ids=[1]), 4)
    assert shared == EnginePlacement(((1,),), (1,), True, "ipc")
    several = engine_placement(config_of(2, gpu_ids=[3, 1, 2, 0], parallel=2), 4)
    assert several == EnginePlacement(((3, 1), (2, 0)), (1, 0), True, "file")
    one = engine_placement(config_of(4, num_engines=1), 4)
    assert one == EnginePlacement(((0,),), (0,), True, "ipc")
    two = engine_placement(config_of(1, num_engines=2), 4)
    assert two == EnginePlacement(((2,), (3,)), (), False, "file")
    leaving = config_of(1)
    leaving.trainer.placement.offload_weights = True
    assert engine_placement(leaving, 1) == EnginePlacement(((0,),), (0,), True, "file")
    never = engine_placement(config_of(1, enable_sleep_mode=False), 1)
    assert never == EnginePlacement(((0,),), (0,), False, "ipc")
    by_file = engine_placement(config_of(1, weight_sync_backend="file"), 1)
    assert by_file == EnginePlacement(((0,),), (0,), True, "file")
    asynchronous = config_of(1)
    asynchronous.trainer.fully_async.enabled = True
    assert not engine_placement(asynchronous, 1).sleeps


@pytest.mark.spec("memory.ranks")
@pytest.mark.parametrize(
    ("is_asynchronous", "num_gpus", "settings", "expected"),
    [
        (False, 8, {}, [8]),  # an engine sleeps on each
        (True, 8, {}, [4, 5, 6, 7]),
        (True, 8, {"parallel": 2}, [4, 5, 6]),
        (True, 8, {"num_engines": 2}, [6]),
        (True, 8, {"num_engines": 2, "parallel": 2}, [4]),
        (True, 3, {}, [2]),
        (True, 1, {}, [1]),  # the engine is next to the trainer
        (True, 8, {"external_server_urls": ["http://127.0.0.1:1"]}, [8]),
    ],
)
def test_ranks_among_which_the_plan_chooses(
    is_asynchronous: bool, num_gpus: int, settings: dict[str, Any], expected: list[int]
) -> None:
    config = config_of(1, **settings)
    config.trainer.fully_async.enabled = is_asynchronous
    assert rank_choices(config, num_gpus) == expected
    assert rank_choices(config, num_gpus, with_engine=False) == [num_gpus]


def test_ranks_that_share_passes_are_groups() -> None:
    config = config_of(1)
    config.trainer.fully_async.enabled = True
    config.trainer.policy.sequence_parallel_size = 2
    assert rank_choices(config, 8) == [4, 6]
    config.trainer.fully_async.enabled = False
    assert rank_choices(config, 7) == [6]


def test_sharded_weights_are_read_where_ranks_gather_them() -> None:
    with pytest.raises(ConfigError, match="as the weights are sharded over 2 GPUs, got nccl"):
        engine_placement(config_of(2, weight_sync_backend="nccl"), 4)
    with pytest.raises(ConfigError, match=r"as no rank has the engines' GPUs \[2, 3\], got ipc"):
        engine_placement(config_of(2, weight_sync_backend="ipc"), 4)
    # A file would need a folder that the nodes share.
    with pytest.raises(ConfigError, match="expected auto or gloo, as the weights are sharded"):
        engine_placement(config_of_nodes(2, weight_sync_backend="nccl"), 2)
    chosen = engine_placement(config_of(2, weight_sync_backend="ipc"), 2)
    assert chosen == EnginePlacement(((0,), (1,)), (0, 1), True, "ipc")


@pytest.mark.spec("async.rank-ipc")
def test_several_ranks_hand_over_weights_where_all_engines_are_on_their_gpus() -> None:
    leaving = config_of(2)
    leaving.trainer.placement.offload_weights = True
    assert engine_placement(leaving, 2).weight_sync == "ipc"  # there until all are gathered
    adapted = config_of(2)
    adapted.trainer.policy.model.lora.rank = 4
    assert engine_placement(adapted, 2).weight_sync == "file"
    replicas = config_of(2, engine_init_kwargs={"data_parallel_size": 2})
    assert engine_placement(replicas, 2).weight_sync == "file"
    partly = config_of(2, gpu_ids=[1, 2])
    assert engine_placement(partly, 4).weight_sync == "file"


def test_nccl_needs_two_gpus_and_auto_one_replica() -> None:
    with pytest.raises(ConfigError, match="NCCL does not connect processes on one GPU, got nccl"):
        engine_placement(config_of(1, weight_sync_backend="nccl"), 1)
    assert engine_placement(config_of(1, weight_sync_backend="nccl"), 2).weight_sync == "nccl"
    assert engine_placement(config_of(2, weight_sync_backend="gloo"), 2).weight_sync == "gloo"
    replicas = config_of(1, engine_init_kwargs={"data_parallel_size": 2})
    assert engine_placement(replicas, 3) == EnginePlacement(((1, 2),), (), False, "file")


def test_what_only_an_engine_in_the_trainers_process_does_takes_one() -> None:
    policies = config_of(4)
    policies.trainer.policy.model.lora.rank = 4
    policies.trainer.policy.model.lora.policies = ["solver", "judge"]
    assert engine_placement(policies, 4).engines == ((0,),)
    with pytest.raises(ConfigError, match=r"2 engines are processes of their own, .* got ipc"):
        engine_placement(config_of(1, num_engines=2, weight_sync_backend="ipc"), 2)


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [
        ({"gpu_ids": [2]}, r"gpu_ids: expected 0 to 1, got \[2\]"),
        ({"gpu_ids": [-1]}, r"gpu_ids: expected 0 to 1, got \[-1\]"),
        (
            {"gpu_ids": [0, 1], "num_engines": 1},
            r"gpu_ids: expected 1 different ones, got \[0, 1\]",
        ),
        ({"gpu_ids": [0], "num_engines": 2}, r"gpu_ids: expected 2 different ones, got \[0\]"),
        ({"gpu_ids": [0], "parallel": 2}, r"expected a multiple of 2 different ones, got \[0\]"),
        ({"gpu_ids": [0, 0], "parallel": 2}, r"2 different ones, got \[0, 0\]"),
        ({"num_engines": 3}, r"num_engines: expected at most 2, as 2 GPUs are found .* got 3"),
        ({"enable_sleep_mode": True}, r"shares no GPU with the trainer \(gpu_ids: \[1\]\)"),
    ],
)
def test_impossible_placements_are_refused(engine: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        engine_placement(config_of(1, **engine), 2)


@pytest.mark.spec("memory.offload-weights")
@pytest.mark.parametrize(
    ("engine", "wanted"),
    [
        ({"gpu_ids": [1]}, r"gpu_ids: \[1\]; .*enable_sleep_mode: None"),
        (
            {"gpu_ids": [0], "enable_sleep_mode": False},
            r"gpu_ids: \[0\]; .*enable_sleep_mode: False",
        ),
    ],
)
def test_weights_stay_where_no_engine_sleeps(engine: dict[str, Any], wanted: str) -> None:
    config = config_of(1, **engine)
    config.trainer.placement.offload_weights = True
    with pytest.raises(ConfigError, match=f"offload_weights: expected null or false.*{wanted}"):
        engine_placement(config, 2)


def config_of_nodes(ranks: int, **engine: Any) -> Config:
    config = config_of(ranks, **engine)
    config.trainer.placement.policy_num_nodes = 2
    return config


@pytest.mark.spec("memory.engine-gpus")
def test_each_of_several_nodes_has_the_same_engines() -> None:
    by_gloo = EnginePlacement(((0,), (1,)), (0, 1), True, "gloo")
    assert engine_placement(config_of_nodes(2), 2) == by_gloo
    assert engine_placement(config_of_nodes(2, num_engines=4), 2) == by_gloo
    spare = EnginePlacement(((2,), (3,)), (), False, "gloo")
    assert node_placement(config_of_nodes(2), 4) == spare
    assert node_placement(config_of_nodes(2), 0) == EnginePlacement(((),), (), False, "gloo")
    two = node_placement(config_of_nodes(2, num_engines=4), 0)
    assert two == EnginePlacement(((), ()), (), False, "gloo")
    # One engine is in rank 0's process, on its GPU.
    one = config_of_nodes(2, num_engines=1)
    assert not one.spreads_engines
    assert engine_placement(one, 1) == EnginePlacement(((0,),), (0,), True, "file")


def test_engines_of_several_nodes_are_as_many_on_each() -> None:
    wanted = "num_engines: expected null, 1 or a multiple of .*policy_num_nodes=2, got 3"
    settings = {"trainer.placement.policy_num_nodes": 2, f"{ENGINE}.num_engines": 3, **BASE}
    with pytest.raises(ConfigError, match=wanted):
        check_config(as_config(settings))


@pytest.mark.spec("update.colocated-nodes")
def test_an_engine_has_the_gpus_that_its_ranks_have_reserved() -> None:
    group = object()
    gpus = [["7"], ["3"], ["0"], ["1"]]  # of ranks 0 to 3, two on a node
    each = colocated_bundles(group, EnginesOfNode(((0,), (1,)), 1.0, 2), 2, gpus)
    assert [(bundle.index, bundle.gpus_of_ranks) for bundle in each] == [
        (0, ("7",)),
        (0, ("3",)),
        (1, ("0",)),
        (1, ("1",)),
    ]
    assert all(bundle.taken == {"CPU": 1.0, "GPU": 0.0} for bundle in each)
    parallel = EnginesOfNode(((0, 1, 2),), 4.0, 3)  # the last GPU has no rank
    assert parallel.resources(2) == {"CPU": 4.0, "GPU": 1.0}
    first, second = colocated_bundles(group, parallel, 2, gpus)
    assert (first.gpus_of_ranks, second.gpus_of_ranks) == (("7", "3"), ("0", "1"))
    assert second.taken == {"CPU": 4.0, "GPU": 1.0}
    on_cpus = colocated_bundles(group, EnginesOfNode(((),), 1.0, None), 1, [[], []])
    assert [(bundle.index, bundle.gpus_of_ranks) for bundle in on_cpus] == [(0, ()), (1, ())]


def test_the_first_of_several_nodes_is_drawn() -> None:
    config = config_of_nodes(2)
    assert draw_nodes(config, engine_placement(config, 2)) == (
        "the first of 2 nodes; the others are like it\n"
        "GPU     0  1\n"
        "rank    0  1\n"
        "engine  0  1\n"
        "engines get their weights by gloo; they sleep during updates"
    )
    one = config_of_nodes(2, num_engines=1)
    drawn = draw_nodes(one, engine_placement(one, 2))
    assert drawn.startswith("the first of 2 nodes; the others have ranks alone\n")


@pytest.mark.spec("update.node-lost")
@pytest.mark.parametrize(
    ("overrides", "counts"),
    [
        ({}, [4, 3, 2, 1]),
        ({"trainer.policy.sequence_parallel_size": 4}, [4, 2]),
        ({"trainer.policy.optimizer_config.optimizer": "adamw_8bit"}, [4]),
    ],
)
def test_a_cluster_run_goes_on_with_as_many_nodes_as_its_ranks_allow(
    overrides: dict[str, Any], counts: list[int]
) -> None:
    config = as_config({"trainer.placement.policy_num_gpus_per_node": 2, **overrides})
    assert list(cluster.possible_counts(config, 4)) == counts


@pytest.mark.spec("update.node-lost")
@pytest.mark.parametrize("writes", [False, True])
def test_a_cluster_run_begins_again_with_the_checkpoint_that_it_was_given(
    writes: bool, tmp_path: Path
) -> None:
    (tmp_path / "step_000003").mkdir()  # of an earlier run in this folder
    tried: list[Any] = []

    def attempt(config: Config) -> str:
        tried.append(config.trainer.resume_mode)
        if len(tried) == 1:
            if writes:
                (tmp_path / "step_000101").mkdir()
            raise RankError("rank 1 has ended")
        return "done"

    config = as_config({"trainer.resume_mode": "from_path", "trainer.resume_path": "other"})
    assert cluster.run_attempts(config, attempt, tmp_path, lost=(RankError,)) == "done"
    assert tried == ["from_path", "latest" if writes else "from_path"]
