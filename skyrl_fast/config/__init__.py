"""The settings of a training run: what there is (`settings`), and how it is read (`loading`)."""

from skyrl_fast.config.algorithm import (
    estimator_settings,
    estimator_spec,
    is_ratio_to_rollout,
    policy_loss_settings,
    policy_loss_spec,
)
from skyrl_fast.config.corrections import (
    DynamicSamplingConfig,
    KlCtrlConfig,
    OffPolicyCorrectionConfig,
)
from skyrl_fast.config.loading import check_config, load_config
from skyrl_fast.config.settings import (
    SCOPES,
    AlgorithmConfig,
    Config,
    GeneratorConfig,
    OptimizerConfig,
    max_input_length,
    merges_steps,
    to_dict,
)
from skyrl_fast.setting import ConfigError

__all__ = [
    "SCOPES",
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "DynamicSamplingConfig",
    "GeneratorConfig",
    "KlCtrlConfig",
    "OffPolicyCorrectionConfig",
    "OptimizerConfig",
    "check_config",
    "estimator_settings",
    "estimator_spec",
    "is_ratio_to_rollout",
    "load_config",
    "max_input_length",
    "merges_steps",
    "policy_loss_settings",
    "policy_loss_spec",
    "to_dict",
]
