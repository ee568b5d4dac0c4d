"""What only the Triton launchers promise; the rest is in the suites that run every backend.

In the interpreter (TRITON_INTERPRET=1) or on a GPU.
"""

import pytest
import torch


@pytest.fixture
def kernels(require):
    require("triton")
    from xrpo_fast.kernels import advantages, logprobs, tuning

    return advantages, logprobs, tuning


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _logits(num_rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    return (3 * torch.randn(num_rows, columns, generator=generator)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("vocab_size", [33000, 40961], ids=["V33000", "V40961"])
def test_rows_split_over_programs_keep_their_bits(kernels, monkeypatch, dtype, vocab_size):
    _, logprobs, _ = kernels
    logits = _logits(3, vocab_size, dtype)
    logits[1, : vocab_size // 2] = float("-inf")
    labels = torch.tensor([5, vocab_size - 1, vocab_size], device=DEVICE)
    results = []
    for splits in (False, True):
        monkeypatch.setattr(logprobs, "splits_rows", lambda *_, splits=splits: splits)
        results.append(logprobs.token_logprobs_fwd(logits, labels, 0.7, None, vocab_size, True))
    for whole, split in zip(*results, strict=True):
        assert torch.equal(whole[:2], split[:2])
        assert torch.equal(whole[2].isnan(), split[2].isnan())


def test_a_view_of_padded_rows_is_read_in_vectors_up_to_its_last_column(kernels):
    _, logprobs, tuning = kernels
    storage = torch.full((3, 264), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    view = storage[:, :257]
    view.copy_(_logits(3, 257, torch.bfloat16))
    assert tuning.reads_vectors(view, 257)
    labels = torch.tensor([0, 100, 256], device=DEVICE)
    got = logprobs.token_logprobs_fwd(view, labels, 1.0, None, 257, False)[0]
    want = view.double().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    assert (got.double() - want).abs().max() < 2e-6


def test_vectors_never_reach_past_the_storage(kernels):
    _, _, tuning = kernels
    storage = torch.zeros(3 * 264 - 7, dtype=torch.bfloat16)
    view = storage.as_strided((3, 257), (264, 1))
    assert not tuning.reads_vectors(view, 257)
    assert tuning.reads_vectors(view, 256)
    assert tuning.reads_vectors(view[:2], 257)
    assert not tuning.reads_vectors(storage.as_strided((3, 256), (257, 1)), 256)
    assert not tuning.reads_vectors(storage[1:].as_strided((2, 256), (264, 1)), 256)


def test_the_gradient_may_have_another_dtype_than_the_logits(kernels):
    _, logprobs, _ = kernels
    logits = _logits(2, 1000, torch.float32)
    labels = torch.tensor([3, 999], device=DEVICE)
    _, _, row_max, row_sum = logprobs.token_logprobs_fwd(logits, labels, 1.0, None, 1000, False)
    upstream = torch.tensor([1.0, -2.0], device=DEVICE)
    arguments = (upstream, None, logits, labels, 1.0, None, 1000, row_max, row_sum, None)
    exact = logprobs.token_logprobs_bwd(*arguments)
    rounded = logprobs.token_logprobs_bwd(
        *arguments, torch.empty_like(logits, dtype=torch.bfloat16)
    )
    assert (rounded.float() - exact).abs().max() <= exact.abs().max() * 2**-7


def test_a_confident_label_keeps_its_gradient_to_float64(kernels):
    """Every other column has probability 1e-8: summed in float32 beside a 1 they would vanish."""
    _, logprobs, _ = kernels
    logits = torch.zeros(1, 2048, device=DEVICE)
    logits[0, 70] = 18.420680743952367
    labels = torch.tensor([70], device=DEVICE)
    _, _, row_max, row_sum = logprobs.token_logprobs_fwd(logits, labels, 1.0, None, 2048, False)
    upstream = torch.ones(1, device=DEVICE)
    got = logprobs.token_logprobs_bwd(
        upstream, None, logits, labels, 1.0, None, 2048, row_max, row_sum, None
    )
    want = 1 - logits.double().softmax(-1)[0, 70]
    assert abs(got[0, 70].item() / want.item() - 1) < 1e-5


def test_scores_of_a_group_are_those_of_sequence_logprobs(kernels):
    advantages, _, _ = kernels
    lengths = torch.tensor([3, 0, 5000, 17])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(DEVICE)
    token_logprobs = -torch.rand(int(lengths.sum()), device=DEVICE)
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0], device=DEVICE)
    cu_groups = torch.tensor([0, 4], device=DEVICE)
    result = advantages.xrpo_advantages_fwd(
        rewards, None, token_logprobs, cu_seqlens, None, cu_groups,
        None, 1.0, None, 2.5, 0.5, "group", 1, 1e-6,
    )  # fmt: skip
    scores, _ = advantages.sequence_logprobs_fwd(token_logprobs, cu_seqlens, "mean")
    torch.testing.assert_close(result[4], scores, rtol=1e-6, atol=0)


def test_one_group_of_more_rows_than_a_block(kernels):
    advantages, _, tuning = kernels
    num_rows = 2 * tuning.ROWS_PER_BLOCK + 3
    rewards = torch.arange(num_rows, dtype=torch.float64, device=DEVICE) % 7
    cu_groups = torch.tensor([0, num_rows], device=DEVICE)
    result = advantages.xrpo_advantages_fwd(
        rewards, None, None, None, None, cu_groups, None, 1.0, None, 0.0, 0.0, "group", 1, 0.0
    )
    want = (rewards - rewards.mean()) / rewards.std()
    torch.testing.assert_close(result[0], want, rtol=1e-12, atol=1e-12)


def test_equal_rewards_give_zero_with_eps_zero(kernels):
    advantages, _, _ = kernels
    rewards = torch.full((5,), 0.35, device=DEVICE)
    cu_groups = torch.tensor([0, 4, 5], device=DEVICE)
    for scale in ("group", "batch", "none"):
        result = advantages.xrpo_advantages_fwd(
            rewards, None, None, None, None, cu_groups, None, 1.0, None, 0.0, 0.0, scale, 1, 0.0
        )
        assert torch.equal(result[0], torch.zeros_like(rewards))
