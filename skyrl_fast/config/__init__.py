"""Settings of a training run: the dataclasses (`settings`) and their parsing (`loading`)."""

from skyrl_fast.config.agent import AgentConfig
from skyrl_fast.config.algorithm import (
    estimator_settings,
    estimator_spec,
    is_ratio_to_rollout,
    policy_loss_settings,
    policy_loss_spec,
    sums_rewards,
)
from skyrl_fast.config.corrections import (
    DynamicSamplingConfig,
    KlCtrlConfig,
    OffPolicyCorrectionConfig,
)
from skyrl_fast.config.engine import InferenceEngineConfig
from skyrl_fast.config.loading import check_config, check_limits, load_config
from skyrl_fast.config.loggers import LOGGERS
from skyrl_fast.config.parse import ConfigSource, as_config
from skyrl_fast.config.sampling import SamplingParams
from skyrl_fast.config.settings import (
    SCOPES,
    AlgorithmConfig,
    Config,
    EnvironmentConfig,
    GeneratorConfig,
    OptimizerConfig,
    SkyRLGymConfig,
    to_dict,
)
from skyrl_fast.setting import ConfigError

__all__ = [
    "LOGGERS",
    "SCOPES",
    "AgentConfig",
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "ConfigSource",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "GeneratorConfig",
    "InferenceEngineConfig",
    "KlCtrlConfig",
    "OffPolicyCorrectionConfig",
    "OptimizerConfig",
    "SamplingParams",
    "SkyRLGymConfig",
    "as_config",
    "check_config",
    "check_limits",
    "estimator_settings",
    "estimator_spec",
    "is_ratio_to_rollout",
    "load_config",
    "policy_loss_settings",
    "policy_loss_spec",
    "sums_rewards",
    "to_dict",
]
