"""Models whose ranks share the tokens of a pass by twos."""

from _fakes import tiny_model
from _moe import tiny_moe
from _ranked import Models, checkpointed, models_of

from skyrl_fast.train.parallel.ranks import Ranks

SHARED = 2  # ranks that share a pass


def make_models(ranks: Ranks) -> Models:
    """Return models of one rank, or of several that share sequences."""
    if ranks.size > 1:
        ranks.share_sequences(SHARED)
    return models_of(
        ranks,
        {
            "one key head": (tiny_model(tied=True), {}),
            "tree": (tiny_model(seed=2), {"tree": True}),
            "experts": (tiny_moe(), {"router_replay": True}),
            "experts on trees": (tiny_moe(seed=1), {"router_replay": True, "tree": True}),
            "windows and sinks": (tiny_moe("gpt_oss", sliding_window=4), {}),
            "windows and sinks on trees": (
                tiny_moe("gpt_oss", seed=1, sliding_window=4),
                {"tree": True},
            ),
            "checkpointed": (checkpointed(tiny_moe()), {"router_replay": True}),
        },
        critic_on_trees=True,
    )
