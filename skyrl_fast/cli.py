"""The command `skyrl-fast`: train, try, plan, serve, record, export, view, and more."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from skyrl_fast import __version__
from skyrl_fast.config.listing import add_arguments as add_settings_arguments
from skyrl_fast.printable import MAX_FAILURE, PrintableFormatter, printable
from skyrl_fast.train.gateway_command import add_arguments as add_gateway_arguments
from skyrl_fast.train.plan_command import add_arguments as add_plan_arguments
from skyrl_fast.train.try_command import add_arguments as add_try_arguments
from skyrl_fast.trajectory_store.export_command import add_arguments as add_export_arguments
from skyrl_fast.viewer.command import add_arguments as add_view_arguments

if TYPE_CHECKING:
    from skyrl_fast.train.run import TrainResult

EXIT_FAILED = 1
EXIT_USAGE = 2
SIGNAL_EXIT = 128  # plus the signal number, as in shells


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: success. 1: training failed. 2: bad configuration or environment. 129, 130, 143: stopped by
    a signal, with a checkpoint if training had begun.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command in ("train", "sft", "try", "engine", "plan", "gateway"):
        options.overrides += rest  # overrides after an option, which argparse does not assign
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "doctor":
        from skyrl_fast.doctor import main as doctor

        return doctor(as_json=options.json)
    if options.command == "engine":
        return _engine(options)
    if options.command == "plan":
        from skyrl_fast.train.plan_command import plan

        return plan(options)
    if options.command == "try":
        from skyrl_fast.train.try_command import try_prompt

        return try_prompt(options)
    if options.command == "gateway":
        from skyrl_fast.train.gateway_command import gateway

        return gateway(options)
    if options.command == "export":
        from skyrl_fast.trajectory_store.export_command import export

        return export(options)
    if options.command == "retrieval":
        from skyrl_fast.extras.search.command import serve

        return serve(options)
    if options.command == "settings":
        from skyrl_fast.config.listing import print_settings

        return print_settings(options)
    if options.command == "view":
        from skyrl_fast.viewer.command import view

        return view(options)
    return _train(options)


def _parser() -> argparse.ArgumentParser:
    from skyrl_fast.extras.search.command import add_arguments as add_retrieval_arguments

    parser = argparse.ArgumentParser(
        prog="skyrl-fast", description="Step-wise reinforcement learning of language-model agents."
    )
    parser.add_argument("--version", action="version", version=f"skyrl-fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help, description in (
        ("train", "train an agent", "Train with the settings of a YAML file and overrides."),
        (
            "sft",
            "train a model on demonstrations",
            "Supervised fine-tuning: data.train_data are chats whose assistant turns are trained.",
        ),
    ):
        train = commands.add_parser(name, help=help, description=description)
        train.add_argument(
            "config", help="YAML file with the sections data, trainer, generator, ..."
        )
        train.add_argument(
            "overrides",
            nargs="*",
            metavar="key=value",
            help="settings that override the file, or YAML files with such",
        )
        train.add_argument(
            "--resume",
            action="store_true",
            help="resume from the newest checkpoint, if there is one",
        )
        train.add_argument("--verbose", action="store_true", help="log at level INFO")
    tried = commands.add_parser(
        "try",
        help="play one prompt through the environment and print it",
        description="Run the agent loop on one training prompt, with scripted answers or the "
        "model's. Exit code 1: a trajectory failed.",
    )
    add_try_arguments(tried)
    plan = commands.add_parser(
        "plan",
        help="show whether a run fits into the memory of its GPUs",
        description="Add up the memory of a run, per GPU, from its settings and its models' "
        "config.json; needs neither GPU nor weights. Exit code 1: it does not fit.",
    )
    add_plan_arguments(plan)
    settings = commands.add_parser(
        "settings",
        help="print the settings with their defaults",
        description="Print the settings that have a word in their name or help, SkyRL's included.",
    )
    add_settings_arguments(settings)
    view = commands.add_parser(
        "view",
        help="show a run's trajectories and metrics in a browser",
        description="Write the report of a run as static pages; no server needed.",
    )
    add_view_arguments(view)
    doctor = commands.add_parser("doctor", help="report what is built, found and missing")
    doctor.add_argument("--json", action="store_true", help="output as JSON")
    engine = commands.add_parser(
        "engine",
        help="serve a model to trainers",
        description="Run vLLM's server for generator.inference_engine.external_server_urls. "
        "Requests need the key in generator.inference_engine.api_key_file, which is created if it "
        "is missing; over a network it is not encrypted.",
    )
    engine.add_argument("config", help="the trainer's YAML file")
    engine.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the file, or YAML files with such",
    )
    engine.add_argument("--host", default="127.0.0.1", help="address to listen on")
    engine.add_argument("--port", type=int, default=8000, help="port to listen on")
    gateway = commands.add_parser(
        "gateway",
        help="record the calls of agents, without training",
        description="Serve a model by OpenAI's and Anthropic's APIs, and record sessions with the "
        "exact tokens. `skyrl-fast export` and `skyrl-fast view` read them.",
    )
    add_gateway_arguments(gateway)
    export = commands.add_parser(
        "export",
        help="write recorded sessions as training data",
        description="Write the trajectories of a recording or a run as a batch, as SkyRL's "
        "generator output, or as chats for fine-tuning.",
    )
    add_export_arguments(export)
    retrieval = commands.add_parser(
        "retrieval",
        help="serve a corpus to search agents",
        description="Search-R1's API: POST /retrieve, GET /health; BM25 by default.",
    )
    add_retrieval_arguments(retrieval)
    return parser


def _train(options: argparse.Namespace) -> int:
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(asctime)s %(name)s: %(message)s"))
    level = logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(level=level, handlers=[handler])
    try:
        from skyrl_fast.config import ConfigError
        from skyrl_fast.config.loading import load_config
        from skyrl_fast.rollout.engine.protocol import EngineError
        from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError
        from skyrl_fast.rollout.failures import RolloutError
        from skyrl_fast.train.algorithm.dynamic_sampling import DynamicSamplingError
        from skyrl_fast.train.divergence import DivergedError
        from skyrl_fast.train.output.checkpoint import CheckpointError, RunInUseError
        from skyrl_fast.train.parallel.ranks import RankError
        from skyrl_fast.train.run import train
        from skyrl_fast.train.setup.errors import SetupError
        from skyrl_fast.train.supervised import sft
        from skyrl_fast.trajectory_store.writer import StoreError
    except ImportError as error:
        return _complain(f"a package is missing: {error}; pip install 'skyrl-fast[train]'")
    overrides = [*options.overrides, *(["trainer.resume_mode=latest"] if options.resume else [])]
    try:
        run = sft if options.command == "sft" else train
        result = run(load_config(options.config, overrides))
    except (ConfigError, SetupError, RunInUseError) as error:
        return _complain(str(error))
    except (
        CheckpointError,
        DivergedError,
        DynamicSamplingError,
        EngineError,
        RankError,
        RolloutError,
        StoreError,
        WeightSyncError,
    ) as error:
        return _complain(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain("stopped before training began", SIGNAL_EXIT + 2)
    sys.stdout.write(summary(result))
    return 0 if result.signal is None else SIGNAL_EXIT + result.signal


def _engine(options: argparse.Namespace) -> int:
    try:
        from skyrl_fast.config.loading import load_config
        from skyrl_fast.rollout.engine.api_key import engine_key
        from skyrl_fast.rollout.engine.protocol import EngineDeadError
        from skyrl_fast.rollout.engine.serve_vllm import serve
        from skyrl_fast.rollout.engine.vllm_start import check_model_folder
        from skyrl_fast.train.flow.vllm_rollouts import key_file, vllm_setup
        from skyrl_fast.train.model.model_folder import model_folder
    except ImportError as error:
        return _complain(f"a package is missing: {error}; pip install 'skyrl-fast[train,vllm]'")
    try:
        config = load_config(options.config, options.overrides)
        setup = vllm_setup(config, str(model_folder(str(config.trainer.policy.model.path))))
        check_model_folder(setup)
        key = engine_key(key_file(config))
    except (ValueError, EngineDeadError) as error:
        return _complain(str(error))
    folder = config.generator.inference_engine.weight_sync_path
    serve(
        replace(setup, log_file=None),
        host=options.host,
        port=options.port,
        key=key,
        weights_folder=folder,
    )
    raise AssertionError("unreachable: the server has replaced this process")


def summary(result: TrainResult) -> str:
    """Return the summary of a run: rewards before and after, files, one trajectory."""
    done = f"{result.step} of {result.total_steps} steps"
    lines = ["", f"{'finished' if result.signal is None else 'stopped'}: {done}"]
    rewards = [
        f"{reward:.3f} {when}"
        for when, reward in (("before", result.before), ("after", result.after))
        if reward is not None
    ]
    if rewards:
        lines.append(f"evaluation reward: {', '.join(rewards)}")
    for name, path in (
        ("learning curve", result.plot),
        ("metrics", result.metrics),
        ("trajectories", result.trajectories),
        ("checkpoint", result.checkpoint),
    ):
        if path is not None:
            lines.append(f"{name + ':':16}{path}")
    if result.trajectories.is_dir():
        lines.append(f"{'view it:':16}skyrl-fast view {result.run_path}")
    if result.sample:
        lines += ["", "one trajectory:", result.sample]
    if result.signal is not None:
        lines += ["", "run the same command with --resume to continue"]
    return "\n".join(lines) + "\n"


def _complain(message: str, code: int = EXIT_USAGE) -> int:
    sys.stderr.write(f"skyrl-fast: {printable(message, MAX_FAILURE)}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
