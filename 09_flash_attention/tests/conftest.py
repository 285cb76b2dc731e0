"""Triton's interpreter runs the kernel in these tests; it has to be asked as Triton loads."""

import contextlib
import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
with contextlib.suppress(ImportError):  # no package for this platform: those tests are skipped
    import flash_triton  # noqa: F401
del os.environ["TRITON_INTERPRET"]  # or every verify of every test would run the kernel too


@pytest.fixture
def interpreted(monkeypatch):
    """Triton looks again as it runs."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
