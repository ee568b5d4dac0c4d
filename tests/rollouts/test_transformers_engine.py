import copy
import dataclasses

import numpy as np
import pytest
import torch

from xrpo_fast.rollouts import lean_decoder
from xrpo_fast.rollouts.agreement import max_logprob_gap
from xrpo_fast.rollouts.transformers import TransformersEngine
from xrpo_fast.types import Sampling

PAD = 0
EOS = frozenset({5, 9})
ARCHITECTURES = ["Llama", "Qwen3", "Qwen2"]
MIXED_LENGTHS = (3, 17, 3, 40, 9, 1)


def new_engine(model, *, temperature=1.0, eos=EOS, max_slots=64, pad_token_id=PAD, **kwargs):
    sampling = Sampling(temperature=temperature, eos_token_ids=eos)
    return TransformersEngine(
        model, sampling, max_slots=max_slots, pad_token_id=pad_token_id, **kwargs
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_agree_with_a_plain_forward_before_and_after_an_update(
    build_model, make_requests, run_engine, architecture, temperature
):
    model = build_model(architecture)
    engine = new_engine(model, temperature=temperature)
    for round_index in range(2):
        requests = make_requests(MIXED_LENGTHS, rollouts=4, max_tokens=24, seed=round_index)
        completions = run_engine(engine, requests).values()
        assert max_logprob_gap(list(completions), model, temperature) < 1e-5
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        engine.load_weights(model.state_dict().items())


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_stale_weights_are_caught_by_the_agreement_check(
    build_model, make_requests, run_engine, is_tied
):
    trained = build_model("Llama", tie_word_embeddings=is_tied)
    engine = new_engine(copy.deepcopy(trained))
    completions = list(run_engine(engine, make_requests((4, 8), rollouts=4)).values())
    assert max_logprob_gap(completions, trained, 1.0) < 1e-5
    with torch.no_grad():
        trained.lm_head.weight += 0.01 * torch.randn_like(trained.lm_head.weight)
    assert max_logprob_gap(completions, trained, 1.0) > 1e-3
    with pytest.raises(ValueError, match=r"state_dict: expected the model's own tensor"):
        engine.load_weights(trained.state_dict().items())


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "Mistral"])
def test_the_forward_of_any_other_model_agrees_too(
    build_model, make_requests, run_engine, architecture, monkeypatch
):
    monkeypatch.setattr(lean_decoder, "supports", lambda model: False)
    model = build_model(architecture)
    requests = make_requests(MIXED_LENGTHS, rollouts=4, max_tokens=24)
    completions = list(run_engine(new_engine(model), requests).values())
    assert max_logprob_gap(completions, model, 1.0) < 1e-5


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ],
    ids=["biases", "no-groups-tied", "yarn"],
)
def test_variants_of_llama_agree(build_model, make_requests, run_engine, overrides):
    model = build_model("Llama", **overrides)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter += 0.1 * torch.randn_like(parameter)
    assert lean_decoder.supports(model)
    requests = make_requests(MIXED_LENGTHS, rollouts=4, max_tokens=24)
    completions = list(run_engine(new_engine(model), requests).values())
    assert max_logprob_gap(completions, model, 1.0) < 1e-5


def test_the_lean_decoder_takes_only_models_as_they_come(build_model):
    for architecture in ARCHITECTURES:
        assert lean_decoder.supports(build_model(architecture))
    assert not lean_decoder.supports(build_model("Mistral"))
    assert not lean_decoder.supports(build_model("Llama").bfloat16())
    assert not lean_decoder.supports(build_model("Llama", hidden_act="gelu"))
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not lean_decoder.supports(build_model("Llama", rope_parameters=dynamic))
    hooked = build_model("Llama")
    hooked.model.norm.register_forward_hook(lambda module, args, output: output)
    assert not lean_decoder.supports(hooked)
    adapted = build_model("Llama")
    adapted.model.layers[1].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[1].mlp.up_proj)
    assert not lean_decoder.supports(adapted)


def test_temperature_left_out_is_caught_by_the_agreement_check(
    build_model, make_requests, run_engine
):
    model = build_model("Llama")
    completions = list(run_engine(new_engine(model, temperature=0.6), make_requests((4,))).values())
    assert max_logprob_gap(completions, model, 1.0) > 1e-2


def test_tokens_do_not_depend_on_batch_slots_order_or_padding(
    build_model, make_requests, run_engine
):
    model = build_model("Qwen3")
    requests = make_requests(MIXED_LENGTHS, rollouts=3, max_tokens=20)
    together = run_engine(new_engine(model), requests)
    in_threes = run_engine(new_engine(model, max_slots=3), requests[::-1])
    alone = run_engine(new_engine(model, max_slots=1), requests[5:9])
    for number, completion in together.items():
        assert completion.token_ids == in_threes[number].token_ids
        np.testing.assert_allclose(completion.logprobs, in_threes[number].logprobs, atol=1e-5)
        if number in alone:
            assert completion.token_ids == alone[number].token_ids


def test_same_seed_same_tokens_and_other_seed_other_tokens(build_model, make_requests, run_engine):
    engine = new_engine(build_model("Llama"), eos=frozenset())
    requests = make_requests((6, 6), rollouts=8)
    first = run_engine(engine, requests)
    again = run_engine(engine, requests)
    assert all(np.array_equal(first[i].logprobs, again[i].logprobs) for i in first)
    assert [first[i].token_ids for i in first] == [again[i].token_ids for i in first]
    assert len({first[i].token_ids for i in range(8)}) == 8
    moved = [dataclasses.replace(request, seed=request.seed + 10**6) for request in requests]
    assert all(run_engine(engine, moved)[i].token_ids != first[i].token_ids for i in first)


def test_a_response_ends_with_the_first_of_several_eos_ids(build_model, make_requests, run_engine):
    model = build_model("Llama", initializer_range=0.05)
    requests = make_requests((5, 11), rollouts=40, max_tokens=60)
    completions = run_engine(new_engine(model), requests).values()
    endings = {completion.token_ids[-1] for completion in completions}
    assert endings >= EOS
    for completion in completions:
        assert EOS.isdisjoint(completion.token_ids[:-1])
        has_ended = completion.token_ids[-1] in EOS
        assert completion.finish_reason == ("stop" if has_ended else "length")
        assert has_ended or len(completion.token_ids) == 60
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.logprobs.dtype == np.float32


def test_each_request_is_cut_at_its_own_limit(build_model, make_requests, run_engine):
    engine = new_engine(build_model("Llama"), eos=frozenset())
    requests = make_requests((5, 9, 2), rollouts=3)
    requests = [dataclasses.replace(r, max_tokens=1 + 5 * r.id) for r in requests]
    completions = run_engine(engine, requests)
    for request in requests:
        completion = completions[request.id]
        assert len(completion.token_ids) == request.max_tokens
        assert completion.finish_reason == "length"
    longest = completions[8]
    short = run_engine(engine, [dataclasses.replace(requests[8], max_tokens=7)])[8]
    assert short.token_ids == longest.token_ids[:7]


def test_eos_as_the_last_permitted_token_is_a_stop(build_model, make_requests, run_engine):
    engine = new_engine(build_model("Llama"), eos=frozenset(range(128)))
    for completion in run_engine(engine, make_requests((5,), rollouts=3, max_tokens=1)).values():
        assert completion.finish_reason == "stop"
        assert len(completion.token_ids) == 1


def test_pad_equal_to_eos_changes_nothing(build_model, make_requests, run_engine):
    model = build_model("Llama", initializer_range=0.05)
    requests = make_requests(MIXED_LENGTHS, rollouts=6, max_tokens=40)
    with_pad = run_engine(new_engine(model, pad_token_id=PAD), requests)
    with_eos = run_engine(new_engine(model, pad_token_id=5), requests)
    assert [c.token_ids for c in with_pad.values()] == [c.token_ids for c in with_eos.values()]
    assert any(c.token_ids[-1] == 5 for c in with_eos.values())


def test_long_responses_outgrow_the_first_cache_and_mask(build_model, make_requests, run_engine):
    model = build_model("Llama")
    requests = make_requests((3, 30), rollouts=2, max_tokens=330)
    requests[0] = dataclasses.replace(requests[0], max_tokens=3)
    engine = new_engine(model, eos=frozenset())
    completions = list(run_engine(engine, requests).values())
    assert max_logprob_gap(completions, model, 1.0) < 1e-5


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=["bf16", "autocast"])
def test_bf16_samples_from_the_bf16_policy(build_model, make_requests, run_engine, compute_dtype):
    model = build_model("Qwen3")
    if compute_dtype is None:
        model = model.bfloat16()
    engine = new_engine(model, compute_dtype=compute_dtype)
    completions = list(run_engine(engine, make_requests(MIXED_LENGTHS, rollouts=4)).values())
    with torch.autocast("cpu", torch.bfloat16, enabled=compute_dtype is not None):
        gap = max_logprob_gap(completions, model, 1.0)
    exact = max_logprob_gap(completions, build_model("Qwen3"), 1.0)
    assert 1e-6 < gap < 0.25
    assert exact > 1e-3


def test_step_runs_one_batch_and_counts_forward_passes(build_model, make_requests):
    engine = new_engine(build_model("Llama"), eos=frozenset(), max_slots=4)
    requests = make_requests((5, 7), rollouts=5, max_tokens=6)
    assert engine.step() == []
    engine.submit(requests[:3])
    assert engine.free_slots() == 1
    engine.submit(requests[3:])
    assert engine.free_slots() == 0
    batches = []
    while batch := engine.step():
        batches.append([completion.request.id for completion in batch])
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert engine.num_steps() == 3 * 6
    assert engine.free_slots() == 4


def test_batches_are_cut_where_padding_outweighs_the_prompts(build_model, make_requests):
    engine = new_engine(build_model("Llama", max_position_embeddings=4096))
    engine.submit(make_requests((2000, *[10] * 12, 1990), max_tokens=1))
    lengths = [sorted(len(c.request.prompt_ids) for c in engine.step()) for _ in range(2)]
    assert lengths == [[10] * 12, [1990, 2000]]


def test_model_is_left_as_it_was(build_model, make_requests, run_engine):
    model = build_model("Llama", attention_dropout=0.9).train()
    model.model.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    rng = torch.get_rng_state()
    completions = list(run_engine(new_engine(model), make_requests((4, 9), rollouts=3)).values())
    assert max_logprob_gap(completions, model, 1.0) < 1e-5
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.config._attn_implementation == "sdpa"
    model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_model_is_left_as_it_was_after_a_failure(build_model, make_requests):
    model = build_model("Llama").train()
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    engine = new_engine(model)
    engine.submit(make_requests((4,)))
    with pytest.raises(RuntimeError, match="engine: expected finite log-probabilities, got NaN"):
        engine.step()
    assert model.training
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "request 0: expected at least one prompt token, got none"),
        ({"max_tokens": 0}, "request 0: expected max_tokens >= 1, got 0"),
        ({"max_tokens": 509}, r"request 0: expected prompt \+ max_tokens <= 512 .* got 4 \+ 509"),
        ({"prompt_ids": (3, 128)}, r"request 0: expected token ids in 0\.\.127, got 128"),
        ({"prompt_ids": (-1, 3)}, r"request 0: expected token ids in 0\.\.127, got -1"),
    ],
    ids=["empty", "no-tokens", "too-long", "outside-vocabulary", "negative"],
)
def test_requests_that_cannot_run_are_named(build_model, make_requests, change, message):
    engine = new_engine(build_model("Llama"))
    bad = dataclasses.replace(make_requests((4,))[0], **change)
    with pytest.raises(ValueError, match=f"requests: {message}"):
        engine.submit([bad])
    assert engine.step() == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "sampling.temperature: expected at least 0.01, got 0.0"),
        ({"temperature": float("nan")}, "sampling.temperature: expected at least 0.01, got nan"),
        ({"eos": frozenset({-1})}, r"sampling.eos_token_ids: expected ids >= 0, got \[-1\]"),
        ({"max_slots": 0}, "max_slots: expected at least 1, got 0"),
        ({"pad_token_id": 128}, r"pad_token_id: expected 0\.\.127, got 128"),
    ],
    ids=["zero", "nan", "eos", "slots", "pad"],
)
def test_settings_out_of_range_are_refused(build_model, settings, message):
    with pytest.raises(ValueError, match=message):
        new_engine(build_model("Llama"), **settings)


def test_sliding_attention_is_refused(build_model):
    with pytest.raises(ValueError, match="model: expected full attention in all layers, got"):
        new_engine(build_model("Mistral", sliding_window=8))


def test_agreement_needs_a_token(build_model):
    with pytest.raises(ValueError, match="completions: expected at least one sampled token"):
        max_logprob_gap([], build_model("Llama"), 1.0)
