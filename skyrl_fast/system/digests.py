"""Digests of texts that are the same in every process and run, which Python's `hash` is not.

They name and place things; none of them protects from forgery. Elsewhere are those with a reason of
their own: XXH3 where gigabytes are read (checkpoints, requests), SHA-256 where a person or another
program compares (keys, data sets, sources of functions, saved indexes).
"""

from __future__ import annotations

from hashlib import blake2b


def digest_number(text: str) -> int:
    """Return 64 bits of a text: a seed, a name, or a place among equals."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def chain_digest(before: bytes, text: str) -> bytes:
    """Return the digest of a sequence of texts, from that of all but the last."""
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
