"""Environments, tools and data formats of other packages, none of which is needed to import this one."""
