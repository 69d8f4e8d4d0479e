"""Fresh random numbers for each test, whose seed a failure prints; nothing useful in shared memory."""

from __future__ import annotations

import secrets

import numpy as np
import pytest

from tests.kernels import library as lib


@pytest.fixture(autouse=True)
def poisoned_shared_memory() -> None:
    lib.poison_shared_memory()


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)
