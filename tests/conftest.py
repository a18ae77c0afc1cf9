"""How thorough property tests are: ``--hypothesis-profile full`` for the full run."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("full", max_examples=2000, deadline=None)
