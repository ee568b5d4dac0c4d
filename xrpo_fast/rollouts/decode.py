"""Decode loop of a batch of requests on a transformers model.

Legend: S requests of the batch, B rows still decoded, U distinct prompts, L columns, V vocabulary.

Prompts are left-padded, so all rows write the same column; each distinct prompt is run once and
its cache is copied to its rollouts. Rows that have ended go on unseen until enough of them have
ended; then they leave the batch, the cache and the columns that only they needed.
"""

from typing import Any

import numpy as np
import torch

from xrpo_fast.rollouts import lean_decoder
from xrpo_fast.rollouts.checks import EngineError
from xrpo_fast.rollouts.kv_cache import CachePart, RowCache
from xrpo_fast.rollouts.sampling import request_uniforms, sample_tokens
from xrpo_fast.types import Completion, Request, Sampling

_PREFILL_TOKENS = 16384
_UNIFORM_BLOCK_TOKENS = 256
# Looking for ended rows costs the GPU a wait, the CPU nothing.
_CHECK_EVERY_TOKENS = {"cpu": 1}
_CHECK_EVERY_TOKENS_DEVICE = 16
_COMPACT_BELOW_FRAC = 0.75


class DecodeBatch:
    """Requests decoded together, from prefill to the last token."""

    def __init__(
        self,
        model: Any,
        requests: list[Request],
        sampling: Sampling,
        pad_token_id: int,
    ) -> None:
        self.model = model
        self.requests = requests
        self.temperature = sampling.temperature
        self.pad_token_id = pad_token_id
        self.device = model.get_input_embeddings().weight.device
        self.num_steps = 0
        self.max_tokens = max(request.max_tokens for request in requests)
        self.eos_ids = np.array(sorted(sampling.eos_token_ids), dtype=np.int64)
        self.is_eos = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        self.is_eos[self.eos_ids[self.eos_ids < len(self.is_eos)]] = True
        self.is_eos = self.is_eos.to(self.device)

        lengths = [len(request.prompt_ids) for request in requests]
        self.rows = torch.arange(len(requests), device=self.device)
        self.limits = self._tensor([request.max_tokens for request in requests])
        self.positions = self._tensor(lengths)
        self.is_done = torch.zeros(len(requests), dtype=torch.bool, device=self.device)
        self.pads = [max(lengths) - length for length in lengths]
        self.lean = None
        if lean_decoder.supports(model) and not torch.is_autocast_enabled(self.device.type):
            self.lean = lean_decoder.LeanDecoder(model, max(lengths) + self.max_tokens)
        shape = (self.max_tokens, len(requests))
        self.token_ids = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=self.device)

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, device=self.device)

    def run(self) -> list[Completion]:
        logits = self._prefill()
        check_every = _CHECK_EVERY_TOKENS.get(self.device.type, _CHECK_EVERY_TOKENS_DEVICE)
        for t in range(self.max_tokens):
            tokens, logprobs = sample_tokens(logits, self._uniforms(t), self.temperature)
            self.token_ids[t, self.rows] = tokens
            self.logprobs[t, self.rows] = logprobs
            self.is_done |= self.is_eos[tokens] | (self.limits <= t + 1)
            if t + 1 == self.max_tokens:
                break
            if (t + 1) % check_every == 0:
                keep = (~self.is_done).nonzero()[:, 0]
                if len(keep) == 0:
                    break
                if len(keep) < _COMPACT_BELOW_FRAC * len(self.rows):
                    self._compact(keep, self.max_tokens - t - 1)
                    tokens = tokens[keep]
            logits = self._forward(tokens)
        return self._completions()

    def _uniforms(self, t: int) -> torch.Tensor:
        offset = t % _UNIFORM_BLOCK_TOKENS
        if offset == 0:
            count = min(_UNIFORM_BLOCK_TOKENS, self.max_tokens - t)
            seeds = [request.seed for request in self.requests]
            self.uniforms = self._tensor(request_uniforms(seeds, t, count))
        return self.uniforms[offset, self.rows]

    def _prefill(self) -> torch.Tensor:
        """Run each distinct prompt once; (S, V) logits of the first token of each request."""
        members: dict[tuple[int, ...], list[int]] = {}
        for row, request in enumerate(self.requests):
            members.setdefault(request.prompt_ids, []).append(row)
        prompts = sorted(members, key=len)
        self.cache = RowCache(self.model.config.num_hidden_layers)
        parts, all_logits = [], []
        while prompts:
            count = 1
            while count < len(prompts) and (count + 1) * len(prompts[count]) <= _PREFILL_TOKENS:
                count += 1
            chunk, prompts = prompts[:count], prompts[count:]
            cache, logits = self._prefill_chunk(chunk)
            source = [u for u, prompt in enumerate(chunk) for _ in members[prompt]]
            target = [row for prompt in chunk for row in members[prompt]]
            part = CachePart(cache=cache, source=self._tensor(source), target=self._tensor(target))
            parts.append(part)
            all_logits.append(logits[part.source])
        self.cache.join(parts, len(self.requests), self.max_tokens)
        self._set_mask()
        order = torch.cat([part.target for part in parts])
        joined = torch.cat(all_logits)
        return torch.empty_like(joined).index_copy_(0, order, joined)

    def _prefill_chunk(self, prompts: list[tuple[int, ...]]) -> tuple[RowCache, torch.Tensor]:
        width = len(prompts[-1])
        pads = self._tensor([width - len(prompt) for prompt in prompts])
        ids = [(self.pad_token_id,) * (width - len(prompt)) + prompt for prompt in prompts]
        columns = torch.arange(width, device=self.device)
        mask = None
        if len(prompts[0]) < width:
            is_visible = (columns[None, :] <= columns[:, None])[None] & (
                columns[None, None, :] >= pads[:, None, None]
            )
            mask = self._additive(is_visible[:, None])
        cache = RowCache(self.model.config.num_hidden_layers)
        positions = (columns[None, :] - pads[:, None]).clamp_(min=0)
        return cache, self._call(self._tensor(ids), positions, mask, cache)

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = None
        if self.mask is not None:
            length = self.cache.length + 1
            if length > self.mask.shape[-1]:
                self._set_mask()
            mask = self.mask[..., :length]
        if self.lean is not None:
            self.num_steps += 1
            logits = self.lean(tokens, self.positions, mask, self.cache)
        else:
            logits = self._call(tokens[:, None], self.positions[:, None], mask, self.cache)
        self.positions += 1
        return logits

    def _call(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: RowCache,
    ) -> torch.Tensor:
        self.num_steps += 1
        return self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _set_mask(self) -> None:
        """Additive mask (B, 1, 1, columns) of the padding, with room for columns to come."""
        self.mask: torch.Tensor | None = None
        if any(self.pads):
            columns = torch.arange(self.cache.length + _UNIFORM_BLOCK_TOKENS, device=self.device)
            is_visible = columns[None, :] >= self._tensor(self.pads)[:, None]
            self.mask = self._additive(is_visible[:, None, None, :])

    def _additive(self, is_visible: torch.Tensor) -> torch.Tensor:
        dtype = self.model.dtype
        if torch.is_autocast_enabled(self.device.type):
            dtype = torch.get_autocast_dtype(self.device.type)
        mask = torch.zeros(is_visible.shape, dtype=dtype, device=self.device)
        # The lowest finite number, as -inf would make NaN of a row of padding.
        return mask.masked_fill_(~is_visible, torch.finfo(dtype).min)

    def _compact(self, keep: torch.Tensor, num_new_columns: int) -> None:
        kept = keep.tolist()
        first = min(self.pads[i] for i in kept)
        self.pads = [self.pads[i] - first for i in kept]
        self.cache.gather(keep, first, num_new_columns)
        self.rows = self.rows[keep]
        self.limits = self.limits[keep]
        self.positions = self.positions[keep]
        self.is_done = self.is_done[keep]
        self._set_mask()

    def _completions(self) -> list[Completion]:
        token_ids, logprobs = self.token_ids.T.cpu().numpy(), self.logprobs.T.cpu().numpy()
        limits = np.array([request.max_tokens for request in self.requests])
        steps = np.arange(self.max_tokens)
        is_end = np.isin(token_ids, self.eos_ids) & (steps < limits[:, None])
        has_ended = np.asarray(is_end.any(axis=1))
        lengths = np.where(has_ended, is_end.argmax(1) + 1, limits)
        is_bad = ~np.isfinite(logprobs) & (steps < lengths[:, None])
        if is_bad.any():
            bad = self.requests[int(is_bad.any(axis=1).argmax())]
            raise EngineError(
                "engine: expected finite log-probabilities, got NaN or infinity in request "
                f"{bad.id}; the weights or the logits are not finite"
            )
        return [
            Completion(
                request=request,
                token_ids=tuple(token_ids[s, : lengths[s]].tolist()),
                logprobs=logprobs[s, : lengths[s]].copy(),
                finish_reason="stop" if has_ended[s] else "length",
            )
            for s, request in enumerate(self.requests)
        ]
