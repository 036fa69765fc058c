"""Forward passes of a batch: planned at once, written one by one."""
