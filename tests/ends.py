"""Models whose answers end at given tokens alone, whatever their settings say."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kvsift.models.hf.generation_config import GenerationSettings


def set_ends(patch: pytest.MonkeyPatch, ends: Collection[int] = ()) -> None:
    """Let answers end at these tokens; by default they are as long as they may be."""
    kept = property(lambda settings: frozenset(ends), lambda settings, own: vars(settings).update(ends=own))
    patch.setattr(GenerationSettings, "ends", kept, raising=False)
