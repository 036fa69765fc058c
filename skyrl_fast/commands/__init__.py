"""The commands of `skyrl-fast`, one module each; `skyrl_fast.cli` chooses among them."""
