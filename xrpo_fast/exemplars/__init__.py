"""Corpus of the policy's own successes, retrieval, leakage guard and prompt states."""

from xrpo_fast.exemplars.corpus import Success
from xrpo_fast.exemplars.states import PromptStates
from xrpo_fast.exemplars.store import ExemplarStore

__all__ = ["ExemplarStore", "PromptStates", "Success"]
