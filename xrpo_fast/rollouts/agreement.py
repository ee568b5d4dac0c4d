"""Do the engine and the trainer's model mean the same policy?"""

from collections.abc import Sequence
from typing import Any

import torch

from xrpo_fast.types import Completion


@torch.no_grad()
def max_logprob_gap(completions: Sequence[Completion], model: Any, temperature: float) -> float:
    """Largest difference between the log-probs of an engine and those of a plain forward.

        max_{i,t} | engine log p(y_it) - log softmax(logits_it / temperature)[y_it] |

    Each row is run alone, without padding and cache, and the log-softmax is taken in float64, so
    that only the engine and the weights it holds can be at fault: a hand-over that was skipped, a
    temperature left out, wrong positions.

    Args:
        completions: at least one with a token; unseeded or seeded, as request.prompt_ids is used.
        model: the trainer's causal language model; run in eval mode, its mode restored.
        temperature: the engine's.
    Returns:
        The gap in nats; infinity where one side is not finite.
    Raises:
        ValueError: no token to compare.
    """
    rows = [completion for completion in completions if completion.token_ids]
    if not rows:
        raise ValueError("completions: expected at least one sampled token, got none")
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        return max(_row_gap(row, model, temperature) for row in rows)
    finally:
        for module in was_training:
            module.training = True


def _row_gap(row: Completion, model: Any, temperature: float) -> float:
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([row.request.prompt_ids + row.token_ids], device=device)
    num_tokens = len(row.token_ids)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=num_tokens + 1).logits[0, :-1]
    logprobs = (logits.double() / temperature).log_softmax(-1)
    ours = logprobs.gather(-1, ids[0, -num_tokens:, None])[:, 0].cpu()
    gap = (ours - torch.from_numpy(row.logprobs).double()).abs().max().item()
    return gap if gap == gap else float("inf")
