"""One SmolLM2 in one worker, shared by all tests of a session."""

from __future__ import annotations

import pytest

import outlines_like as ol


@pytest.fixture(scope="session")
def smollm2() -> ol.models.Model:
    """The real model of the box, in float32."""
    return ol.models.transformers("smollm2-135m")
