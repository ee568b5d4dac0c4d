"""The fused ops under TRL's names, and XRPO's advantages inside TRL's GRPOTrainer.

    from xrpo_fast.integrations.trl import XrpoMixin

    class Trainer(XrpoMixin, GRPOTrainer):
        novelty_weight = 2.5

Tested against TRL 1.16. TRL gives every prompt the same number of rollouts and reports equal
groups everywhere, so planner and seeding need this package's own trainer.
"""

from typing import Any

import torch
from torch import Tensor

from xrpo_fast.ops import linear_token_logprobs, token_logprobs, xrpo_advantages

TRL_EPS = 1e-4
"""What TRL adds to the standard deviation; ours is 1e-6."""


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Log-probs of chosen tokens: trl.trainer.utils.selective_log_softmax in one fused pass.

    Args:
        logits: (..., V).
        index: (...) or (..., K) int64; K log-probs per row are one pass each.
        row_mask: as index; rows with 0 give log-prob 0 and no gradient.
    Returns:
        Like index, float32 nats, whatever the dtype of the logits: TRL's is rounded to theirs.
    """
    mask = None if row_mask is None else row_mask.bool()
    if index.ndim == logits.ndim - 1:
        return token_logprobs(logits, index, temperature=temperature, mask=mask).logprobs
    columns = [
        token_logprobs(
            logits,
            index[..., k].contiguous(),
            temperature=temperature,
            mask=None if mask is None else mask[..., k].contiguous(),
        ).logprobs
        for k in range(index.shape[-1])
    ]
    return torch.stack(columns, dim=-1)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """(...) entropy of each row in nats: trl.trainer.utils.entropy_from_logits in one fused pass.

    Args:
        chunk_size: taken for the sake of TRL's signature; nothing is cut into chunks.
    """
    del chunk_size
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    entropy = token_logprobs(logits, labels, return_entropy=True).entropy
    assert entropy is not None
    return entropy


class XrpoMixin:
    """In front of GRPOTrainer in a class's bases: fused log-probs and novelty advantages.

    novelty_weight 0 gives TRL's own advantages. Scores are taken from the old log-probs where TRL
    has them, else from one forward without gradient.
    """

    novelty_weight: float = 2.5
    novelty_clip: float = 0.5
    full_reward: float = 1.0

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Tensor:
        rewards = super()._calculate_rewards(*arguments, **named)  # pyright: ignore
        weights = self.reward_weights.to(rewards.device)  # pyright: ignore
        combined = (rewards * weights).nansum(dim=1)
        self._combined_rewards = combined.masked_fill(rewards.isnan().all(dim=1), torch.nan)
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)  # pyright: ignore
        trainer: Any = self
        group_size = (
            trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        )
        mask = output["completion_mask"].bool()
        scores = None
        if self.novelty_weight:
            scores = trainer.accelerator.gather(self._scores(output, mask))
        rewards = self._combined_rewards
        edges = torch.arange(0, len(rewards) + 1, group_size, device=rewards.device)
        shaped = xrpo_advantages(
            rewards,
            scores=scores,
            cu_groups=edges,
            full_reward=self.full_reward,
            novelty_weight=self.novelty_weight,
            novelty_clip=self.novelty_clip,
            scale=trainer.scale_rewards,
            eps=TRL_EPS,
        )
        first = trainer.accelerator.process_index * len(mask)
        own = shaped.advantages[first : first + len(mask)]
        output["advantages"] = own.to(output["advantages"].dtype)
        return output

    def _scores(self, output: dict[str, Any], mask: Tensor) -> Tensor:
        """(S,) mean log-prob of each completion; NaN where it is empty."""
        logprobs = output.get("old_per_token_logps")
        if logprobs is None:
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
            attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            with torch.no_grad():
                logprobs = self._get_per_token_logps_and_entropies(
                    self.model,  # pyright: ignore
                    ids,
                    attention,
                    mask.shape[1],
                )[0]
        lengths = mask.sum(dim=1)
        return torch.where(mask, logprobs.float(), 0.0).sum(dim=1) / lengths

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs of the completion through linear_token_logprobs: logits never exist in full."""
        if compute_aux_loss or any(value is not None for value in images.values()):
            return super()._get_per_token_logps_and_entropies(  # pyright: ignore
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                **images,
            )
        trainer: Any = self
        base = trainer.accelerator.unwrap_model(model)
        head = base.get_output_embeddings()
        pieces = []
        for start in range(0, len(input_ids), batch_size or len(input_ids)):
            rows = slice(start, start + (batch_size or len(input_ids)))
            with trainer.accelerator.autocast():
                hidden = base.get_decoder()(
                    input_ids=input_ids[rows], attention_mask=attention_mask[rows], use_cache=False
                ).last_hidden_state[:, -logits_to_keep - 1 : -1]
            pieces.append(
                linear_token_logprobs(
                    hidden,
                    head.weight.to(hidden.dtype),
                    input_ids[rows, -logits_to_keep:],
                    bias=head.bias,
                    mask=attention_mask[rows, -logits_to_keep:].bool(),
                    temperature=trainer.temperature,
                    return_entropy=compute_entropy,
                )
            )
        entropies = [piece.entropy for piece in pieces if piece.entropy is not None]
        return (
            torch.cat([piece.logprobs for piece in pieces]),
            torch.cat(entropies) if entropies else None,
            None,
        )
