"""Inputs of one forward pass: refusals, and the phase of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsift.errors import InputError, UnsupportedCall
from kvsift.models.hf.attention import NAME
from kvsift.models.hf.calls import Calls
from kvsift.models.hf.run import SparseRun


def check_call(config: Any, kwargs: dict[str, Any]) -> None:
    """Refuse options of a forward pass that kvsift's layers do not support.

    Raises:
        InputError: naming the option.
    """
    in_use = config._attn_implementation
    if in_use != NAME:
        raise UnsupportedCall(
            f"the attention implementation of the model is now {in_use!r}; a cache of kvsift needs {NAME!r}. Call "
            "set_attn_implementation outside kvsift.sparse, or make the cache after it."
        )
    weights = kwargs.get("output_attentions")
    if weights:
        raise no_weights("leave it out")
    if weights is None and getattr(config, "output_attentions", False):
        raise no_weights(
            "config.json of the model asks for it, so remove it there, or set model.config.output_attentions = False"
        )
    if kwargs.get("cu_seq_lens_q") is not None:
        raise _packed("cu_seq_lens_q packs")


def check_intact(layers: Sequence[Any]) -> None:
    """Refuse a cache that a forward pass has left in its middle.

    Raises:
        InputError: if its layers hold different tokens.
    """
    if len({layer.columns for layer in layers}) > 1 or any(layer.is_waiting for layer in layers):
        raise UnsupportedCall(
            "a forward pass with this cache has failed or was interrupted in its middle, so that its layers hold "
            "different tokens. Call cache.reset(), or make a new one."
        )


def check_uncached(kwargs: dict[str, Any], calls: Calls) -> None:
    """Refuse a forward pass without a cache that kvsift would answer wrongly, or slowly.

    Raises:
        InputError: for packed sequences, and for generate() without a cache.
    """
    if kwargs.get("use_cache") is False and calls.generate:
        raise UnsupportedCall(
            "generate() runs without a cache here (use_cache=False), so every step would be a dense prefill of the "
            "whole sequence; leave it out."
        )
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return
    if positions.ndim == 3:  # several axes: the text's is the first of four; of three, the first is time
        is_text, positions = len(positions) == 4, positions[0]
        restarts = (positions.diff(dim=1) != 1) if is_text else (positions.diff(dim=1) < 0)
    else:
        restarts = positions.diff(dim=-1) != 1
    if bool(restarts.any()):
        raise _packed("position_ids that start anew pack")


def count_decode_tokens(run: SparseRun, cache: Any, num_new: int, kwargs: dict[str, Any], calls: Calls) -> int:
    """Return how many tokens at the end of a forward pass are generated ones, drafts to verify included.

    Args:
        run: state of the cache.
        cache: holds the tokens so far.
        num_new: tokens of the forward pass.
        kwargs: arguments of the forward pass.
        calls: methods of the model that this thread is running.

    Raises:
        InputError: if transformers is about to feed cached tokens again, or drafts under a plan with min_recovery.
    """
    count = _count_decode_tokens(run, cache, num_new, kwargs, calls)
    if count > 1 and run.plan.is_guarded:
        raise UnsupportedCall(
            f"min_recovery decides after every generated token, and {count} come at once: drafts of assisted decoding "
            "or prompt lookup. Leave out the drafts, or min_recovery."
        )
    return count


def _count_decode_tokens(run: SparseRun, cache: Any, num_new: int, kwargs: dict[str, Any], calls: Calls) -> int:
    if run.feeding is not None:
        return num_new if run.feeding == "decode" else 0
    past = cache.get_seq_length()
    if calls.prefill and (past == 0 or num_new > 1 or calls.chunked):
        return 0  # on a filled cache, a prefill of generate() with one new token is a step like any other
    kept = kwargs.get("logits_to_keep")
    # assisted decoding requests one logit more than there are drafts
    drafts = kept - 1 if isinstance(kept, int) and kept > 0 else None
    if past == 0:
        return drafts or 0 if calls.generate else 0
    if num_new == 1:
        return 1
    if not calls.generate:
        return 0
    if drafts is not None and drafts != num_new - 1:
        raise UnsupportedCall(
            f"the cache holds {past} tokens, and {num_new} come at once where {drafts + 1} were asked for: the prompt "
            "is shorter than the cache, or assisted decoding or prompt lookup starts on a filled one, for which "
            "transformers feeds the whole sequence again and answers wrongly. Give the whole conversation without "
            "drafts, or an empty cache."
        )
    return num_new


def no_weights(remedy: str) -> InputError:
    """The refusal of attention weights, with what to do."""
    return UnsupportedCall(
        f"output_attentions=True asks for all attention weights, which kvsift never computes; {remedy}. kvsift.LLM and "
        "kvsift explain report what was attended."
    )


def _packed(what: str) -> InputError:
    return UnsupportedCall(
        f"{what} several sequences into one row, which kvsift would attend as one. Pass one sequence per row."
    )
