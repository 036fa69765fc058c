"""The trajectory viewer: a run as a static page, written by `skyrl-fast view RUN`."""
