"""A run as a folder of static pages: `skyrl-fast view RUN`."""
