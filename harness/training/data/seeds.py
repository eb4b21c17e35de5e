"""Seeds derived from their purpose, independent of what was drawn before."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["derived"]


def derived(*parts: int | str) -> int:
    """A number below 2**63 that is the same for equal parts on every machine, and unrelated for other parts."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), "big") >> 1
