"""Settings: YAML, overrides, and messages about invalid ones."""

import copy
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from _settings import NEEDED, error_of

pytest.importorskip("omegaconf")

from skyrl_fast import cli
from skyrl_fast.config import Config, ConfigError, as_config, to_dict
from skyrl_fast.config.aliases import ALIAS_TYPES
from skyrl_fast.config.loading import check_config, load_config
from skyrl_fast.config.settings import leaves
from skyrl_fast.config.skyrl_settings import SKYRL_ONLY


def test_overrides_take_precedence_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "data: {train_data: [a.jsonl]}\n"
        "trainer: {seed: 1, epochs: 2, policy: {model: {path: m}, optimizer_config: {lr: 1e-3}}}\n"
    )
    config = load_config(path, ["trainer.seed=7", "generator.sampling_params.stop=['</sql>']"])
    assert (config.trainer.seed, config.trainer.epochs) == (7, 2)
    assert config.trainer.policy.optimizer_config.lr == 1e-3
    assert config.generator.sampling_params.stop == ["</sql>"]


@pytest.mark.spec("settings.texts")
@pytest.mark.parametrize(
    "text",
    [
        "0123",
        "1_000",
        "0x10",
        "1:30",
        "12.50",
        "1e5",
        "no",
        "on",
        "true",
        "2026-11-25",
        "it's",
        ".inf",
    ],
)
def test_settings_that_are_texts_are_texts(text: str, tmp_path: Path) -> None:
    stop = "generator.sampling_params.stop"
    path = tmp_path / "config.yaml"
    path.write_text(
        f"trainer:\n  run_name: {text}  # a name\n  ckpt_path: &p {text}\n"
        f"generator: {{sampling_params: {{stop: [{text}, {text}]}}}}\nagent.model: {text}\n"
        f"environment: {{env_class: ! {text}}}\n"
    )
    for config in (
        load_config(path, NEEDED),
        load_config(
            None,
            [*NEEDED, f"trainer.run_name={text}", f"trainer.ckpt_path={text}",
             f"{stop}=[{text}, {text}]", f"agent.model={text}", f"environment.env_class={text}"],
        ),
    ):  # fmt: skip
        got = config.trainer.run_name, config.trainer.ckpt_path, config.agent.model
        assert got == (text,) * 3
        assert config.generator.sampling_params.stop == [text] * 2
        assert config.environment.env_class == text
    one = load_config(None, [*NEEDED, f"{stop}={text}", "trainer.run_name='x'"])
    assert (one.generator.sampling_params.stop, one.trainer.run_name) == ([text], "x")
    numbered = load_config(None, [*NEEDED, f"trainer.run_path=runs/{text} #2"])
    assert numbered.trainer.run_path == f"runs/{text} #2"


@pytest.mark.spec("settings.texts")
def test_null_is_no_text_and_values_of_other_types_are_unchanged() -> None:
    options = ["trainer.ckpt_path=null", "trainer.seed=0x10", "generator.chat_template_kwargs.x=no"]
    config = load_config(None, [*NEEDED, *options])
    assert (config.trainer.ckpt_path, config.trainer.seed) == (None, 16)
    assert config.generator.chat_template_kwargs == {"x": False}
    assert "trainer.run_name: expected a string, got None" in error_of("trainer.run_name=~")


@pytest.mark.spec("settings.texts")
def test_anchors_are_shared_between_texts_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer:\n"
        "  seed: &n 07\n  run_name: *n\n  project_name: &t 0x1F\n  max_training_steps: *t\n"
        "  policy: {model: &m {path: 0123}}\n  ref: {model: {<<: *m}}\n  critic: {model: *m}\n"
        "data: {train_data: [&d 1_0], val_data: [*d]}\n"
        "trainer.algorithm: {advantage_estimator: gae}\n"
    )
    config = load_config(path)
    trainer = config.trainer
    assert (trainer.seed, trainer.run_name) == (7, "07")
    assert (trainer.project_name, trainer.max_training_steps) == ("0x1F", 31)
    assert [model.model.path for model in (trainer.policy, trainer.ref, trainer.critic)] == [
        "0123"
    ] * 3
    assert config.data.train_data == config.data.val_data == ["1_0"]


def test_dotted_keys_of_a_file_are_sections(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    upstream = "{base_url: 'http://a/v1', model: m}"
    path.write_text(
        "data.train_data: [a.jsonl]\ntrainer.run_path: runs/a\ntrainer.seed: 1\n"
        "trainer: {policy.model.path: m, ckpt_path: '${trainer.run_path}/c'}\n"
        f"agent.upstreams: {{gpt-4.1: {upstream}}}\n"
    )
    other = tmp_path / "other.yaml"
    other.write_text(
        f"trainer.policy: {{model.path: 012}}\nagent: {{upstreams: {{a.b: {upstream}}}}}"
    )
    config = load_config(
        path, ["trainer.seed=2", "trainer={run_path: runs/b, policy.model.path: n}"]
    )
    assert (config.trainer.seed, config.trainer.policy.model.path) == (2, "n")
    assert config.trainer.ckpt_path == "runs/b/c"
    config = load_config(path, [str(other), "trainer.resume_mode=latest"])
    assert (config.trainer.policy.model.path, config.trainer.resume_mode) == ("012", "latest")
    assert config.agent.upstreams.keys() == {"gpt-4.1", "a.b"}
    path.write_text("trainer.policy.model.path: m\ntrainer: {policy: {model: {path: n}}}\n")
    with pytest.raises(ConfigError, match=r"trainer\.policy\.model: given twice"):
        load_config(path)


def test_interpolation_and_optional_section() -> None:
    config = load_config(
        None,
        [
            *NEEDED,
            "trainer.run_path=runs/a",
            "trainer.ckpt_path=${trainer.run_path}/c",
            "generator.eval_sampling_params.temperature=0",
        ],
    )
    assert config.trainer.ckpt_path == "runs/a/c"
    assert config.generator.eval_sampling_params is not None
    assert config.generator.eval_sampling_params.temperature == 0.0


def test_dict_round_trip() -> None:
    config = load_config(None, [*NEEDED, "trainer.logger=jsonl"])
    assert config.trainer.logger == ["jsonl"]
    assert as_config(to_dict(config)) == config


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"5\n", "cannot be read"),
        ("# caf\xe9".encode("latin-1"), "cannot be read: 'utf-8' codec"),
        (b"trainer: {seed: 1, seed: 2}", "found duplicate key seed"),
        (b"trainer:\n  run_path: ???\n", "Missing mandatory value: run_path"),
        (b"generator:\n", "generator: expected a section with keys, got None"),
    ],
)
def test_invalid_settings_files_are_named(content: bytes, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=wanted):
        load_config(path, NEEDED)


@pytest.mark.parametrize(
    "override", ["data.train_data[0]=x", "trainer=[1]", "trainer.seed=[", "trainer.run_path=\ud800"]
)
def test_invalid_override_is_named(override: str) -> None:
    assert error_of(override).startswith(f"override {override!r}: cannot be read: ")


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("trainer.trian_batch_size=4", "did you mean trainer.train_batch_size?"),
        ("trainer.lr=1", "did you mean trainer.policy.optimizer_config.lr?"),
        ("genrator.max_turns=1", "did you mean generator?"),
        ("generator.eval_sampling_params.top_q=1", "generator.eval_sampling_params.top_p"),
        ("trainer.placement.colocate_policy_ref=true", "SkyRL setting"),
        ("trainer.micro_train_batch_size_per_gpu=1", "trainer.max_tokens_per_microbatch"),
        ("trainer.zzzzqqq=1", "trainer has "),
        ("trainer.learning_rate=1", "did you mean trainer.policy.optimizer_config.lr?"),
        ("generator.max_tokens=1", "did you mean generator.sampling_params.max_generate_length?"),
        ("trainer.lora=1", "did you mean trainer.policy.model.lora?"),
        ("distributed_executor_backend=ray", "parallelism inside an engine is vLLM's"),
        ("trainer.gpus=2", "trainer has "),  # no name is near
    ],
)
def test_unknown_key_gets_a_suggestion(override: str, wanted: str) -> None:
    message = error_of(override)
    assert wanted in message
    assert override.partition("=")[0].split(".")[0] in message


def test_every_skyrl_setting_exists_or_is_explained() -> None:
    """SkyRL 0.4.0 has all settings of 0.3.0."""
    lines = (Path(__file__).parents[1] / "helpers/skyrl_settings.txt").read_text().splitlines()
    settings = {name: value for name, value, _ in leaves(Config())}
    open_sections = tuple(name for name, value in settings.items() if not value)
    advice, counts = set(SKYRL_ONLY.values()), Counter()
    for name in lines[1:]:
        message = ""
        try:
            as_config({name: object()})  # no setting has this type, but sections of free keys
        except ConfigError as error:
            message = str(error)
        explained = message.partition("a SkyRL setting that does not exist here: ")[2] in advice
        counts[explained] += 1
        is_known = name in settings or name in ALIAS_TYPES or name.startswith(open_sections)
        assert explained or is_known, message
    assert counts == {True: 262, False: 153}


STEP_WISE = "generator.step_wise_trajectories"
MERGE = "generator.merge_stepwise_output"
MULTI_TURN = "generator.use_conversation_multi_turn"
LOCAL = "generator.inference_engine.run_engines_locally"
URLS = "generator.inference_engine.external_server_urls"


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        ({STEP_WISE: True}, "trainer.rows", "step"),
        ({STEP_WISE: True, MERGE: True}, "trainer.rows", "merged"),
        ({"generator": {"merge_stepwise_output": True}}, "trainer.rows", "merged"),
        ({MERGE: False}, "trainer.rows", "step"),
        ({STEP_WISE: False}, "trainer.rows", "trajectory"),
        ({STEP_WISE: True, "trainer.rows": "merged"}, "trainer.rows", "merged"),
        ({MULTI_TURN: False}, "generator.context", "single"),
        ({MULTI_TURN: True}, "generator.context", "append"),
        ({MULTI_TURN: True, "generator.context": "retemplate"}, "generator.context", "retemplate"),
        ({"trainer.max_prompt_length": 7}, "generator.max_input_length", 7),
        (
            {"trainer.max_prompt_length": 7, "generator.max_input_length": 9},
            "generator.max_input_length",
            9,
        ),
        ({LOCAL: True}, URLS, []),
        ({LOCAL: False, URLS: ["http://a:1"]}, URLS, ["http://a:1"]),
    ],
)
def test_other_names_of_skyrl_choose_the_setting(
    given: dict[str, Any], setting: str, value: Any
) -> None:
    settings = {name: found for name, found, _ in leaves(as_config(given))}
    assert settings[setting] == value


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({STEP_WISE: False, MERGE: True}, f"{MERGE}: expected false with {STEP_WISE}=false"),
        ({MERGE: True, "trainer.rows": "step"}, f"trainer.rows: expected merged with {MERGE}=true"),
        (
            {MULTI_TURN: True, "generator.context": "single"},
            "expected append or retemplate or compact with",
        ),
        ({LOCAL: False}, f"{URLS}: expected at least one address with {LOCAL}=false, got []"),
        ({LOCAL: True, URLS: ["http://a:1"]}, f"{URLS}: expected none with {LOCAL}=true"),
        ({STEP_WISE: "x"}, f"{STEP_WISE}: expected true or false, got 'x'"),
    ],
)
def test_other_names_of_skyrl_that_contradict_a_setting(given: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_config(given)
    assert wanted in str(caught.value)


def test_files_and_overrides_count_in_their_order(tmp_path: Path) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yml"
    one.write_text(
        "trainer: {seed: 1, epochs: 2, policy: {model: {path: m}}}\ndata: {train_data: [x]}"
    )
    other.write_text("trainer: {seed: 3, run_name: cluster}")
    found = load_config(one, ["trainer.seed=2", str(other), "trainer.run_name=mine"]).trainer
    assert (found.seed, found.epochs, found.run_name) == (3, 2, "mine")
    with pytest.raises(ConfigError, match=r"config file not found: none\.yaml"):
        load_config(one, ["none.yaml"])
    other.write_text("[1]")
    with pytest.raises(ConfigError, match=r"other\.yml: expected sections"):
        load_config(one, [str(other)])


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("trainer.seed=abc", "trainer.seed: expected an integer, got 'abc' (str)"),
        ("trainer.seed=1.5", "trainer.seed: expected an integer, got 1.5 (float)"),
        ("trainer.seed=true", "trainer.seed: expected an integer, got True (bool)"),
        ("trainer.plot=1", "trainer.plot: expected true or false"),
        (
            "trainer.seed=${oc.env:PATH}",
            "expected an integer, got '${oc.env:PATH}' (str): write ${oc.decode:${oc.env:PATH}}",
        ),
        ("trainer.seed=1${oc.env:PATH}", "expected an integer, got '1${oc.env:PATH}' (str)"),
        ("trainer.policy=3", "trainer.policy: expected a section"),
        ("trainer.train_batch_size=0", "trainer.train_batch_size: expected at least 1, got 0"),
        ("trainer.policy.optimizer_config.lr=-1", "lr: expected at least 0, got -1"),
        ("trainer.policy.optimizer_config.lr=.nan", "lr: expected a number, got nan"),
        ("generator.sampling_params.top_p=1.5", "top_p: expected at most 1, got 1.5"),
        ("generator.sampling_params.temperature=0", "temperature: expected > 0 in training"),
        ("trainer.algorithm.policy_loss_type=regulr", "did you mean 'regular'?"),
        ("trainer.logger=[jsonl,tensorbord]", "did you mean 'tensorboard'?"),
        ("trainer.policy_mini_batch_size=48", "a divisor of trainer.train_batch_size=64, got 48"),
        ("trainer.eval_interval=0", "eval_interval"),
        ("trainer.policy.optimizer_config.adam_betas=[0.9]", "two numbers in [0, 1)"),
        ("trainer.resume_mode=from_path", "trainer.resume_path"),
        ("data.train_data=[]", "data.train_data: expected at least one file"),
        ("trainer.policy.model.path=null", "trainer.policy.model.path: expected a model"),
        ("trainer.seed", "expected dotted.key=value"),
        ("+trainer.seed=1", "expected dotted.key=value"),
        ("trainer.ckpt_path=${nothing.here}", "cannot be read"),
        ("trainer.seed=1700000000000000000", "trainer.seed: expected at most 4294967295, got 17"),
        (
            "generator.sampling_params.additional_kwargs={n: 2}",
            "generator.sampling_params.additional_kwargs: expected vLLM parameters that neither "
            "the settings nor the agent loop set, got n",
        ),
        (
            "generator.eval_sampling_params.additional_kwargs={temperature: 0.5}",
            "generator.eval_sampling_params.additional_kwargs: expected vLLM parameters that",
        ),
    ],
)
def test_wrong_values_name_the_key(override: str, wanted: str) -> None:
    assert wanted in error_of(override)


@pytest.mark.parametrize("estimator", ["rloo", "turn_level_group"])
def test_leave_one_out_baseline_requires_several_samples(estimator: str) -> None:
    chosen = f"trainer.algorithm.advantage_estimator={estimator}"
    assert load_config(None, [*NEEDED, chosen])
    message = error_of(chosen, "generator.n_samples_per_prompt=1")
    assert "generator.n_samples_per_prompt: expected at least 2" in message
    assert estimator in message


@pytest.mark.spec("advantage.kl-controller")
def test_kl_horizon_of_a_fifth_of_a_batch_is_refused() -> None:
    control = "trainer.algorithm.kl_ctrl={type: adaptive, horizon: 64}"
    assert load_config(None, [*NEEDED, control])  # without effect
    message = error_of(control, "trainer.algorithm.use_kl_in_reward=true")  # 64 prompts, 5 samples
    assert "kl_ctrl.horizon: expected more than 64 (otherwise one batch can make" in message


@pytest.mark.spec("replay.settings")
def test_replay_needs_recorded_routes() -> None:
    replay = "trainer.policy.moe_enable_routing_replay=true"
    recorded = "generator.inference_engine.enable_return_routed_experts"
    assert f"{recorded}: expected true" in error_of(replay)
    assert load_config(None, [*NEEDED, replay, f"{recorded}=true"])
    skyrl = "trainer.policy.megatron_config.moe_enable_routing_replay=true"
    assert "is trainer.policy.moe_enable_routing_replay" in error_of(skyrl)


def test_an_integer_is_a_number() -> None:
    config = load_config(None, [*NEEDED, "trainer.policy.optimizer_config.lr=0"])
    assert config.trainer.policy.optimizer_config.lr == 0.0


def test_missing_file_and_broken_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config file not found"):
        load_config(tmp_path / "no.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("trainer: [1, 2\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(broken)
    broken.write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected sections"):
        load_config(broken)


def test_defaults_need_only_data_and_model() -> None:
    config = Config()
    config.data.train_data = ["a.jsonl"]
    config.trainer.policy.model.path = "m"
    check_config(config)


def test_off_policy_corrections_by_skyrl_names() -> None:
    config = load_config(
        None,
        [
            *NEEDED,
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=3",
            "trainer.algorithm.dynamic_sampling.type=null",
            "trainer.algorithm.sequence_scope=row",
            "trainer.algorithm.kl_ctrl.type=adaptive",
        ],
    )
    algorithm = config.trainer.algorithm
    assert algorithm.off_policy_correction.enabled
    assert algorithm.off_policy_correction.token_tis_ratio_clip_high == 3.0
    assert algorithm.dynamic_sampling.type is None
    assert Config().trainer.algorithm.sequence_scope == "trajectory"
    assert not Config().trainer.algorithm.off_policy_correction.enabled


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (
            ["use_kl_in_reward=true", "use_kl_loss=true"],
            "use_kl_in_reward: expected false with trainer.algorithm.use_kl_loss=true",
        ),
        (
            ["off_policy_correction.tis_ratio_type=token", "policy_loss_type=kl_cov"],
            "expected none with trainer.algorithm.policy_loss_type=kl_cov, as its selection of "
            "tokens has no weights, got tis_ratio_type=token",
        ),
        (
            ["off_policy_correction.token_mask_is_threshold_low=0.1", "old_logprobs=rollout"],
            "expected none with trainer.algorithm.old_logprobs=rollout, as it compares the",
        ),
        (["dynamic_sampling.max_sample_batches=0"], "expected >= 1 or -1, got 0"),
        (["dynamic_sampling.type=drop"], "expected one of filter, replace, got 'drop'"),
        (["sequence_scope=group"], "expected one of row, trajectory, got 'group'"),
        (
            [
                "policy_loss_type=cispo",
                "cispo.cispo_ratio=rollout",
                "off_policy_correction.tis_ratio_type=token",
            ],
            "expected null with trainer.algorithm.policy_loss_type=cispo, as its ratio corrects",
        ),
        *(
            (
                ["off_policy_correction.tis_ratio_type=token", f"policy_loss_type={loss}"],
                f"expected null with trainer.algorithm.policy_loss_type={loss}, as its ratio",
            )
            for loss in ("rollout_is", "dppo")
        ),
        (["dppo.dppo_type=kl"], "expected one of binary_tv, binary_kl, got 'kl'"),
        (["clip_cov.clip_ratio=2"], "expected at most 1, got 2.0"),
        (["use_tis=true"], "off_policy_correction.tis_ratio_type=token"),
    ],
)
def test_invalid_off_policy_corrections(overrides: list[str], wanted: str) -> None:
    assert wanted in error_of(*(f"trainer.algorithm.{text}" for text in overrides))


SECRETS = """
data: {train_data: [a.jsonl]}
trainer: {policy: {model: {path: m}}, run_name: "run of ${oc.env:TOKEN}", project_name: x}
environment:
  skyrl_gym:
    llm_as_a_judge: {key: "${oc.env:TOKEN}", plain: yes, list: ["Bearer ${oc.env:TOKEN}", 3]}
    search: ${environment.skyrl_gym.llm_as_a_judge}
generator: {sampling_params: {stop: ["${environment.skyrl_gym.llm_as_a_judge.key}"]}}
"""


@pytest.mark.spec("settings.environment-values")
def test_values_of_environment_variables_are_used_and_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    (tmp_path / "config.yaml").write_text(SECRETS)
    config = load_config(tmp_path / "config.yaml")
    config = pickle.loads(pickle.dumps(copy.deepcopy(as_config(config))))
    gym = config.environment.skyrl_gym
    assert gym.llm_as_a_judge["key"] == gym.search["key"] == "hunter2"
    assert gym.llm_as_a_judge["list"] == ["Bearer hunter2", 3]
    assert config.generator.sampling_params.stop == ["hunter2"]
    assert config.trainer.run_name == "run of hunter2"
    written = to_dict(config)
    assert "hunter2" not in json.dumps(written) and "hunter2" not in repr(config)
    assert written["trainer"]["run_name"] == "run of ${oc.env:TOKEN}"
    judge = written["environment"]["skyrl_gym"]["llm_as_a_judge"]
    assert judge == {"key": "${oc.env:TOKEN}", "plain": True, "list": ["Bearer ${oc.env:TOKEN}", 3]}
    assert written["trainer"]["project_name"] == "x"
    assert to_dict(config, resolved=True)["trainer"]["run_name"] == "run of hunter2"


@pytest.mark.spec("settings.one-line-errors")
@pytest.mark.parametrize(
    "value",
    ["[" * 5000 + "]" * 5000, "{a: " * 5000 + "1" + "}" * 5000, "9" * 5000, "9" * 400],
    ids=["list", "mapping", "digits", "overflow"],
)
def test_deep_or_long_values_are_errors_of_one_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"trainer: {{policy: {{optimizer_config: {{lr: {value}}}}}}}\n")
    override = f"trainer.policy.optimizer_config.lr={value}"
    for arguments in ((path, []), (None, [override]), (None, [f"{'a.' * 3000}b=1"])):
        with pytest.raises(ConfigError) as error:
            load_config(*arguments)
        assert "\n" not in str(error.value)


@pytest.mark.spec("settings.finite")
@pytest.mark.parametrize(
    "key",
    [
        "trainer.policy.optimizer_config.lr",
        "trainer.policy.optimizer_config.weight_decay",
        "trainer.critic.optimizer_config.lr",
        "generator.sampling_params.temperature",
        "generator.eval_sampling_params.temperature",
        "generator.sampling_params.repetition_penalty",
        "trainer.algorithm.kl_loss_coef",
    ],
)
def test_infinite_values_are_refused(key: str) -> None:
    assert error_of(f"{key}=.inf") == f"{key}: expected a finite number, got inf"


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"seed": 3}, r"^data\.train_data: expected at least one file of prompts, got none$"),
        ({"seed": "x"}, r"^trainer\.seed: expected an integer, got 'x' \(str\)$"),
        ({"sed": 3}, r"^trainer\.sed: unknown setting"),
    ],
)
def test_sections_given_as_mappings_are_checked(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(Config(trainer=trainer))  # type: ignore[arg-type]


@pytest.mark.parametrize("command", [["gateway"], ["try", "--engine"]])
def test_commands_that_sample_from_the_base_refuse_an_adapter(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(
        "trainer: {policy: {model: {path: m, lora: {rank: 4, path: adapter}}}}\n"
        "data: {train_data: [x.jsonl]}\n"
        "agent: {function: 'agent.py:agent'}\n"
    )
    name, *options = command
    assert cli.main([name, str(tmp_path / "run.yaml"), *options]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        f"trainer.policy.model.lora.path: skyrl-fast {' '.join(command)} samples from the" in said
    )
