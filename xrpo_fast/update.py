"""Micro-batches -> loss -> one optimizer update. The loss does not depend on the cut."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xrpo_fast.batching import collate, cut_micro_batches
from xrpo_fast.config import LossConfig, OptimConfig
from xrpo_fast.metrics import DeviceSums
from xrpo_fast.objectives import OBJECTIVES
from xrpo_fast.objectives.common import LossInputs, LossScale, k3_terms
from xrpo_fast.policy import Policy
from xrpo_fast.types import MicroBatch, MiniBatch, TrainingRow

MAX_MISMATCH_WEIGHT = 2.0
"""Cap of the truncated importance weight p_trainer / p_sampler."""


class Updater:
    """Owns the optimizer. The frozen reference exists only where loss.kl_weight > 0."""

    def __init__(
        self,
        *,
        policy: Policy,
        reference: Policy | None,
        loss: LossConfig,
        optim: OptimConfig,
        max_response_tokens: int,
        sums: DeviceSums,
    ) -> None:
        self.policy = policy
        self.reference = reference
        self.loss_config = loss
        self.optim_config = optim
        self.max_response_tokens = max_response_tokens
        self.sums = sums
        self.objective = OBJECTIVES[loss.objective]
        self.num_updates = 0
        self.optimizer = torch.optim.AdamW(
            [p for p in policy.model.parameters() if p.requires_grad],
            lr=optim.learning_rate,
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def learning_rate(self, update: int) -> float:
        """Of the update with this index, 0 being the first: linear warm-up, then constant."""
        config = self.optim_config
        share = (update + 1) / config.warmup_steps if config.warmup_steps else 1.0
        return config.learning_rate * min(1.0, share)

    def fill_old_logprobs(self, rows: Sequence[TrainingRow]) -> None:
        """Log-probs of the policy as it is now, for updates after the first."""
        for row, logprobs in zip(rows, self._score(self.policy, rows), strict=True):
            row.old_logprobs = logprobs

    def fill_reference_logprobs(self, rows: Sequence[TrainingRow]) -> None:
        if self.reference is not None:
            for row, logprobs in zip(rows, self._score(self.reference, rows), strict=True):
                row.reference_logprobs = logprobs

    def apply(self, batch: MiniBatch) -> None:
        """One update from a mini-batch; none where no row carries gradient."""
        if not batch.rows:
            return
        scale = LossScale(
            clip_low=self.loss_config.clip_low,
            clip_high=self.loss_config.clip_high,
            dual_clip=self.loss_config.dual_clip,
            num_rows=batch.num_rows,
            num_tokens=batch.num_tokens,
            max_response_tokens=self.max_response_tokens,
        )
        for micro in self._micro_batches(batch.rows):
            self._loss(micro, scale).backward()
        self._step_optimizer()

    def _loss(self, micro: MicroBatch, scale: LossScale) -> Tensor:
        new = self.policy.token_logprobs(micro, return_entropy=True)
        old = new.logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
        mismatch = old - micro.sampler_logprobs
        is_measured = mismatch.isfinite()
        mismatch = torch.where(is_measured, mismatch, 0.0)
        weights = None
        if self.loss_config.mismatch == "tis":
            weights = mismatch.exp().clamp(max=MAX_MISMATCH_WEIGHT)
        inputs = LossInputs(
            token_logprobs=new.logprobs,
            old_logprobs=old,
            advantages=micro.advantages,
            row_weights=micro.row_weights,
            row_index=micro.row_index,
            lengths=micro.lengths,
            mismatch_weights=weights,
            is_shaped=micro.is_shaped,
        )
        output = self.objective.loss(inputs, scale)
        loss = output.loss
        if micro.reference_logprobs is not None:
            terms = k3_terms(new.logprobs, micro.reference_logprobs)
            loss = loss + self.loss_config.kl_weight * self.objective.aggregate(
                terms, inputs, scale
            )
            self.sums.add(kl=terms.sum())
        assert new.entropy is not None
        self.sums.add(
            loss=loss,
            entropy=new.entropy.sum(),
            tokens=torch.ones_like(loss) * micro.labels.numel(),
            clipped_low=output.clipped_low,
            clipped_high=output.clipped_high,
            measured=is_measured.sum(),
            mismatch_abs=mismatch.abs().sum(),
            mismatch_ratio=torch.where(is_measured, mismatch.exp(), 0.0).sum(),
        )
        self.sums.maximum(mismatch_max=mismatch.abs().max())
        return loss

    def _step_optimizer(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.num_updates)
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.model.parameters(), self.optim_config.max_grad_norm
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        self.sums.add(grad_norm=norm, updates=torch.ones_like(norm))

    def _micro_batches(self, rows: Sequence[TrainingRow]):
        for indices in cut_micro_batches(rows, self.optim_config.micro_batch_tokens):
            yield self._collate([rows[i] for i in indices])

    def _collate(self, rows: Sequence[TrainingRow]) -> MicroBatch:
        return collate(rows, pad_token_id=self.policy.pad_token_id, device=self.policy.device)

    @torch.no_grad()
    def _score(self, policy: Policy, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """[L] float32 log-probs per row, in one transfer from the device."""
        batches = cut_micro_batches(rows, self.optim_config.micro_batch_tokens)
        if not batches:
            return []
        packed = [
            policy.token_logprobs(self._collate([rows[i] for i in b])).logprobs for b in batches
        ]
        order = [i for batch in batches for i in batch]
        ends = np.cumsum([len(rows[i].response_ids) for i in order])[:-1]
        pieces = np.split(torch.cat(packed).cpu().numpy(), ends)
        scored: list[np.ndarray] = [np.empty(0, np.float32)] * len(rows)
        for i, piece in zip(order, pieces, strict=True):
            scored[i] = piece
        return scored

    def read_metrics(self) -> dict[str, float]:
        """Means of what the step's updates summed up; the step's one read from the device."""
        sums = self.sums.read()
        values = {
            "learning_rate": self.learning_rate(max(self.num_updates - 1, 0)),
            "updates": sums.get("updates", 0.0),
        }
        tokens, updates = sums.get("tokens"), sums.get("updates")
        if not tokens or not updates:
            return values
        values.update(
            {
                "loss": sums["loss"] / updates,
                "grad_norm": sums["grad_norm"] / updates,
                "entropy": sums["entropy"] / tokens,
                "clip_frac/low": sums["clipped_low"] / tokens,
                "clip_frac/high": sums["clipped_high"] / tokens,
                "tokens/trained": tokens,
            }
        )
        if "kl" in sums:
            values["kl"] = sums["kl"] / tokens
        if sums["measured"]:
            values["mismatch/logprob_abs_mean"] = sums["mismatch_abs"] / sums["measured"]
            values["mismatch/logprob_abs_max"] = sums["mismatch_max"]
            values["mismatch/ratio_mean"] = sums["mismatch_ratio"] / sums["measured"]
        return values

    def state_dict(self) -> dict:
        return {"adamw": self.optimizer.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["adamw"])
        self.num_updates = state["num_updates"]
