"""The entry point that verl loads in each of its processes: it registers the estimators."""

from __future__ import annotations

from skyrl_fast.integrations.verl import register_on_import

register_on_import()
