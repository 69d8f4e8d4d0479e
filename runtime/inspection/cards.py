"""Memory bandwidth and size of common NVIDIA cards, and how one is found by name.

Source: NVIDIA's data sheets (data centre and workstation cards) and its GeForce specification pages. Peak figures of
the memory itself: reads reach about nine tenths (4.5 of an H200's 4.8 TB/s).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engines.errors import UsageError

# Words that tell a card from its namesake.
_VARIANTS = {"ti", "super", "laptop", "max", "mobile", "d", "pcie", "ada", "pro", "nvl", "40gb"}
_PLAIN = {"nvidia", "geforce", "quadro", "tesla", "generation", "edition", "workstation", "server", "gpu"}


@dataclass(frozen=True)
class Card:
    """gb_per_s: peak of its memory, in 1e9 bytes. gigabytes: nominal size, in 2^30 bytes."""

    name: str
    gb_per_s: float
    gigabytes: float


CARDS = (
    Card("B200", 8000, 180),
    Card("H200", 4800, 141),
    Card("H100 SXM", 3350, 80),
    Card("H100 PCIe", 2000, 80),
    Card("A100 80GB", 2039, 80),
    Card("A100 80GB PCIe", 1935, 80),
    Card("A100 40GB", 1555, 40),
    Card("L40S", 864, 48),
    Card("L4", 300, 24),
    Card("A10", 600, 24),
    Card("RTX PRO 6000 Blackwell", 1792, 96),
    Card("RTX 6000 Ada", 960, 48),
    Card("RTX A6000", 768, 48),
    Card("RTX 5090", 1792, 32),
    Card("RTX 5080", 960, 16),
    Card("RTX 5070 Ti", 896, 16),
    Card("RTX 5070", 672, 12),
    Card("RTX 5060 Ti", 448, 16),
    Card("RTX 4090", 1008, 24),
    Card("RTX 4080 SUPER", 736, 16),
    Card("RTX 4080", 717, 16),
    Card("RTX 4070 Ti SUPER", 672, 16),
    Card("RTX 4070", 504, 12),
    Card("RTX 4060 Ti", 288, 8),
    Card("RTX 3090", 936, 24),
    Card("RTX 3080", 760, 10),
    Card("RTX 3060", 360, 12),
)


def card_named(name: str) -> Card:
    """The card that a user means. Raises UsageError for none, or more than one."""
    found = find_cards(name)
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"--gpu {name}: may be {' or '.join(card.name for card in found)}; say which")
    known = ", ".join(card.name for card in CARDS)
    raise UsageError(f"--gpu {name}: not in the table; give its memory's speed with --bandwidth, or one of {known}")


def find_cards(name: str) -> list[Card]:
    """By a user's words, or a driver's ("NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB")."""
    wanted = _words(name)
    for matches in (lambda words: words == wanted, lambda words: words < wanted, lambda words: words > wanted):
        found = [
            card
            for card in CARDS
            if wanted and matches(_words(card.name)) and _words(card.name) & _VARIANTS == wanted & _VARIANTS
        ]
        if found:
            most = max(len(_words(card.name) & wanted) for card in found)
            return [card for card in found if len(_words(card.name) & wanted) == most]
    return []


def _words(name: str) -> frozenset[str]:
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"rtx(?=\d)", "rtx ", name.lower()))) - _PLAIN
    if "hbm3" in words:  # how the driver names an H100 with SXM
        words = words - {"hbm3", "80gb"} | {"sxm"}
    return frozenset("sxm" if word.startswith("sxm") and "h100" in words else word for word in words)
