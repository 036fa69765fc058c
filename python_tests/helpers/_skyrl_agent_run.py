"""Two steps of SkyRL's `RayPPOTrainer.train` with agents, in front of a scripted engine client.

python _skyrl_agent_run.py TOKENIZER OUT.json: writes the number of rows and what was logged.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import _skyrl_ray_run
import test_skyrl_agents as agents

_skyrl_ray_run.VOCAB = 300
synthetic_settings = _skyrl_ray_run.settings


def settings(merge: bool) -> Any:
    cfg = synthetic_settings(merge)
    cfg.generator.max_turns, cfg.generator.max_input_length = 4, 256
    return cfg


class Generator:
    """An `AgentGenerator` with prompts of its own: one trajectory of each batch fails."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        from examples.skyrl_agents.skyrl_agents import AgentGenerator

        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
        client = agents.Client(tokenizer)
        self._generator = AgentGenerator(
            settings(False).generator, client, tokenizer, agent=agents.AGENT
        )

    async def generate(self, input_batch: Any) -> dict[str, Any]:
        count = len(input_batch["prompts"])
        given = {
            **input_batch,
            "prompts": [[{"role": "user", "content": "task"}] for _ in range(count)],
            "env_extras": [{"answer": "fails" if n == 1 else str(n % 3)} for n in range(count)],
        }
        return await self._generator.generate(given)


def main() -> None:
    import ray

    _skyrl_ray_run.settings, _skyrl_ray_run.Generator = settings, Generator
    ray.init(num_cpus=2, include_dashboard=False)
    from skyrl.backends.skyrl_train.utils.ppo_utils import sync_registries

    sync_registries()
    runs = [_skyrl_ray_run.run(merge) for merge in (False, True)]
    ray.shutdown()
    results = [
        {
            "rows": [len(batch["tensors"]["sequences"]) for batch in run["batches"]],
            "logs": run["logs"],
            "losses": [status["loss"] for status in run["statuses"]],
        }
        for run in runs
    ]
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
