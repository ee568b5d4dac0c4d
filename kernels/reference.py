"""The meaning of every op in plain PyTorch: any device, any float dtype; in float64 the truth.

Legend: P prompts (groups), S sequences (rollouts), T tokens, V vocabulary. The Triton and C++
launchers have these names, arguments and results.

    z_v      = (x_v - max_v x) / temperature
    logprob  = z_y - log sum_v exp(z_v)
    entropy  = log sum_v exp(z_v) - sum_v p_v z_v                       p_v = exp(z_v) / sum exp(z)
    dx_v     = (dlogprob (1[v = y] - p_v) + dentropy p_v (sum_u p_u z_u - z_v)) / temperature

A row is scored where its mask is True (or there is none). An unscored row is never read: logprob,
entropy and gradient are exactly 0. A scored row whose label is outside 0..vocab_size-1 gives NaN
logprob and entropy and a gradient of exactly 0. Both leave row_max 0 and row_sum 1.
"""

import torch
from torch import Tensor


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_states(labels: Tensor, mask: Tensor | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(scored rows, rows with a usable label), both (T,) bool."""
    scored = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    return scored, scored & (labels >= 0) & (labels < vocab_size)


def _per_row(temperature: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """A float, or (T, 1) or (1, 1)."""
    return temperature.to(dtype)[:, None] if isinstance(temperature, Tensor) else temperature


def _shifted(
    logits: Tensor, valid: Tensor, temperature: float | Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """row_max (T,) and z (T, vocab_size)."""
    x = logits[:, :vocab_size].to(_compute_dtype(logits.dtype))
    x = torch.where(valid[:, None], x, 0.0)
    row_max = x.amax(-1)
    return row_max, (x - row_max[:, None]) / _per_row(temperature, x.dtype)


def token_logprobs_fwd(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    vocab_size: int,
    return_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprobs, entropy or an empty tensor, row_max, row_sum).

    logits (T, V), any row stride; labels (T,); temperature a float, or (T,) or (1,) float32; mask
    (T,) bool. The first three results are float32 (float64 for float64 logits), row_sum float64.
    """
    scored, valid = _row_states(labels, mask, vocab_size)
    row_max, z = _shifted(logits, valid, temperature, vocab_size)
    exp_z = z.exp()
    row_sum = exp_z.sum(-1, dtype=torch.float64)
    log_sum = row_sum.log()
    safe_labels = torch.where(valid, labels, 0).long()
    logprobs = z.gather(1, safe_labels[:, None]).squeeze(1) - log_sum
    entropy = logprobs.new_empty(0)
    if return_entropy:
        weighted = torch.where(exp_z == 0, 0.0, exp_z * z).sum(-1, dtype=torch.float64)
        entropy = log_sum - weighted / row_sum

    def finish(values: Tensor) -> Tensor:
        values = torch.where(valid, values, float("nan"))
        return torch.where(scored, values, 0.0).to(z.dtype)

    return (
        finish(logprobs),
        finish(entropy) if return_entropy else entropy.to(z.dtype),
        torch.where(valid, row_max, 0.0),
        torch.where(valid, row_sum, 1.0),
    )


def token_logprobs_bwd(
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    vocab_size: int,
    row_max: Tensor,
    row_sum: Tensor,
    entropy: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """dlogits (T, V) in the dtype of logits: contiguous, or `out` (any row stride, may be logits).

    Columns from vocab_size on are 0. A row whose upstream gradients are all 0 is not read: 0.
    """
    _, valid = _row_states(labels, mask, vocab_size)
    needed = valid & (dlogprobs != 0)
    if dentropy is not None:
        needed |= valid & (dentropy != 0)
    x = logits[:, :vocab_size].to(row_max.dtype)
    x = torch.where(needed[:, None], x, 0.0)
    scale = _per_row(temperature, x.dtype)
    z = (x - row_max[:, None]) / scale
    probs = z.exp() / row_sum[:, None].to(x.dtype)
    grad = -probs * dlogprobs[:, None]
    safe_labels = torch.where(valid, labels, 0).long()
    grad.scatter_add_(1, safe_labels[:, None], dlogprobs[:, None].to(grad.dtype))
    if dentropy is not None:
        assert entropy is not None
        mean_z = (row_sum.log() - entropy)[:, None].to(x.dtype)
        grad += dentropy[:, None] * torch.where(probs == 0, 0.0, probs * (mean_z - z))
    grad = torch.where(needed[:, None], grad / scale, 0.0)
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    out[:, :vocab_size] = grad
    out[:, vocab_size:] = 0
    return out


def _segment_of(positions: int, cu_segments: Tensor) -> Tensor:
    """(positions,) int64: the segment that holds each position; empty segments hold none."""
    index = torch.arange(positions, device=cu_segments.device)
    return torch.searchsorted(cu_segments[1:].long().contiguous(), index, right=True)


def sequence_logprobs_fwd(
    token_logprobs: Tensor, cu_seqlens: Tensor, normalize: str
) -> tuple[Tensor, Tensor]:
    """(scores (S,), lengths (S,) int64): sums over each sequence, divided by its length for "mean".

    Sums are taken in float64; scores are float32 (float64 for float64). Length 0 gives score 0.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    segment = _segment_of(token_logprobs.numel(), cu_seqlens)
    scores = torch.zeros(lengths.shape, dtype=torch.float64, device=token_logprobs.device)
    scores.index_add_(0, segment, token_logprobs.double())
    if normalize == "mean":
        scores = scores / lengths.clamp(min=1)
    return scores.to(_compute_dtype(token_logprobs.dtype)), lengths


def _row_scores(
    scores: Tensor | None,
    token_logprobs: Tensor | None,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """(scores (S,) float64, which rows have one (S,) bool)."""
    if scores is not None:
        return scores.double(), scores.isfinite()
    if token_logprobs is None:
        return like.new_zeros(like.shape), torch.zeros_like(like, dtype=torch.bool)
    if cu_seqlens is not None:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        segment = _segment_of(token_logprobs.numel(), cu_seqlens)
        total = like.new_zeros(like.shape).index_add_(0, segment, token_logprobs.double())
    else:
        assert token_mask is not None
        lengths = token_mask.sum(-1)
        total = torch.where(token_mask, token_logprobs.double(), 0.0).sum(-1)
    mean = total / lengths.clamp(min=1)
    return mean, (lengths > 0) & mean.isfinite()


def xrpo_advantages_fwd(
    rewards: Tensor,
    scores: Tensor | None,
    token_logprobs: Tensor | None,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    cu_groups: Tensor,
    correct: Tensor | None,
    full_reward: float,
    exclude: Tensor | None,
    novelty_weight: float,
    novelty_clip: float,
    scale: str,
    ddof: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(advantages, base, bonus, eta, scores, mean, std), each (S,); float64 for float64 rewards.

        base  = (r - mean) / (std + eps), or r - mean for scale "none"; 0 where r is NaN (unscored)
        eta   = exp(s - mean of s over the rows of the group that take part), 1 for the others
        bonus = min(max(novelty_weight (1 - eta), 0), novelty_clip base)
                where correct and base > 0, else 0
        advantages = base + bonus

    Takes part: a finite score of at least one token, a scored reward, not excluded. `std` is what
    divides: of the group, or of all scored rows for scale "batch"; 0 where fewer than ddof + 1 rows
    are scored. A group without a scored row has mean and std NaN. `scores` are the row's mean
    log-prob (0 without tokens), or those given. cu_groups (P+1,) may end in empty groups. Sums are
    taken in float64, of differences from the first scored reward: equal rewards give exactly 0.
    Without `correct`, a row is correct where r >= full_reward in the dtype of rewards.
    """
    num_seqs, num_groups = rewards.numel(), cu_groups.numel() - 1
    values = rewards.double()
    scored = ~values.isnan()
    group = _segment_of(num_seqs, cu_groups)

    def group_sum(x: Tensor, keep: Tensor) -> Tensor:
        """Per row: the sum of x over the kept rows of its group."""
        total = x.new_zeros(max(num_groups, 1), dtype=torch.float64)
        return total.index_add_(0, group, torch.where(keep, x.double(), 0.0))[group]

    def first_kept(x: Tensor, keep: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """Per row: x at the first kept row of its group."""
        rows = torch.arange(num_seqs, device=x.device)
        first = torch.full((max(num_groups, 1),), num_seqs, device=x.device)
        first.scatter_reduce_(0, group, torch.where(keep, rows, num_seqs), "amin")
        return x[first[group].clamp(max=num_seqs - 1)]

    first = first_kept(values, scored, group, num_groups)
    diff = values - first
    count = group_sum(torch.ones_like(values), scored)
    mean_diff = group_sum(diff, scored) / count
    centered = diff - mean_diff
    variance = group_sum(centered.square(), scored) / (count - ddof)
    std = torch.where(count > ddof, variance, 0.0).sqrt()
    if scale == "batch":
        everyone = torch.zeros_like(group)
        batch_diff = values - first_kept(values, scored, everyone, 1)
        batch_count = scored.sum()
        batch_mean = torch.where(scored, batch_diff, 0.0).sum() / batch_count
        squares = torch.where(scored, (batch_diff - batch_mean).square(), 0.0).sum()
        std = torch.where(batch_count > ddof, squares / (batch_count - ddof), 0.0).sqrt()
        std = std.expand(num_seqs)
    std = torch.where(count > 0, std, float("nan"))
    base = centered if scale == "none" else centered / (std + eps)
    base = torch.where(scored & (centered != 0), base, 0.0)

    row_scores, has_score = _row_scores(scores, token_logprobs, cu_seqlens, token_mask, values)
    takes_part = has_score & scored
    if exclude is not None:
        takes_part &= ~exclude
    num_novel = group_sum(torch.ones_like(values), takes_part)
    mean_score = group_sum(row_scores, takes_part) / num_novel
    eta = torch.where(takes_part, (row_scores - mean_score).exp(), 1.0)
    is_correct = rewards >= full_reward if correct is None else correct
    bonus = torch.minimum((novelty_weight * (1.0 - eta)).clamp(min=0.0), novelty_clip * base)
    bonus = torch.where(is_correct & takes_part & (base > 0), bonus, 0.0)

    mean = torch.where(count > 0, first + mean_diff, float("nan"))
    results = (base + bonus, base, bonus, eta, row_scores, mean, std)
    dtype = _compute_dtype(rewards.dtype)
    a, b, c, d, e, f, g = (x.to(dtype) for x in results)
    return a, b, c, d, e, f, g
