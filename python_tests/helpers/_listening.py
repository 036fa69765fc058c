"""The addresses that a process listens on."""

import os
from pathlib import Path

LOOPBACK = "0100007F"  # 127.0.0.1 as in /proc/net/tcp


def listening(process: int) -> set[str]:
    """Return the TCP addresses that a process listens on, as in /proc."""
    links = (os.readlink(f) for f in Path(f"/proc/{process}/fd").iterdir() if f.is_symlink())
    sockets = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].partition(":")[0])
    return found
