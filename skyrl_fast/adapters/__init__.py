"""Environments and tools of other packages, none of which is needed to import this one."""
