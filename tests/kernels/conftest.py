"""Fresh random numbers for each test; a failure prints the seed."""

from __future__ import annotations

import secrets

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)
