"""One SmolLM2 in one worker, shared by all tests of a session."""

from __future__ import annotations

import os

import pytest

import outlines_like as ol

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch in this process must not spin while workers want the cores


@pytest.fixture(scope="session")
def smollm2() -> ol.models.Model:
    """The real model of the box, in float32."""
    return ol.models.transformers("smollm2-135m", deterministic=True)
