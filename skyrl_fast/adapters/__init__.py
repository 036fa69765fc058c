"""Environments, tools and data formats of other packages; none is needed to import this one."""
