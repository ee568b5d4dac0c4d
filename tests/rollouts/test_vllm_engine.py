"""VllmEngine on real vLLM: one engine per architecture for the whole module."""

import dataclasses

import numpy as np
import pytest
import torch

from xrpo_fast.rollouts import EngineError, max_logprob_gap
from xrpo_fast.types import Sampling

EOS = frozenset({5, 9})
SLOTS = 16
MIXED_LENGTHS = (3, 17, 3, 40, 9, 1)
SETTINGS = {
    "Llama": {"temperature": 1.0, "is_tied": False},
    "Qwen3": {"temperature": 0.6, "is_tied": True},
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def setup(request, require, build_model, tmp_path_factory):
    require("vllm")
    from xrpo_fast.rollouts.vllm import VllmEngine

    settings = SETTINGS[request.param]
    model = build_model(request.param, tie_word_embeddings=settings["is_tied"])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    engine = VllmEngine(
        str(folder),
        Sampling(temperature=settings["temperature"], eos_token_ids=EOS),
        max_slots=SLOTS,
        max_model_len=128,
        dtype=torch.float32,
    )
    yield engine, model, settings["temperature"]
    engine.close()


def change(model, scale=0.05):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn_like(parameter)


def test_logprobs_agree_after_each_hand_over_and_a_stale_weight_is_caught(
    setup, make_requests, run_engine
):
    engine, model, temperature = setup
    for round_index in range(3):
        requests = make_requests(MIXED_LENGTHS, rollouts=4, max_tokens=24, seed=round_index)
        completions = list(run_engine(engine, requests).values())
        assert max_logprob_gap(completions, model, temperature) < 1e-4
        change(model)
        stale = list(run_engine(engine, requests).values())
        assert max_logprob_gap(stale, model, temperature) > 1e-2
        engine.load_weights(model.state_dict().items())


def test_a_stale_head_alone_is_caught(setup, make_requests, run_engine):
    engine, model, temperature = setup
    with torch.no_grad():
        model.lm_head.weight += 0.01 * torch.randn_like(model.lm_head.weight)
    requests = make_requests((4, 8), rollouts=4)
    stale = list(run_engine(engine, requests).values())
    assert max_logprob_gap(stale, model, temperature) > 1e-3
    engine.load_weights(model.state_dict().items())
    fresh = list(run_engine(engine, requests).values())
    assert max_logprob_gap(fresh, model, temperature) < 1e-4


def test_tokens_depend_on_the_seed_and_not_on_the_batch(setup, make_requests, run_engine):
    engine, _, _ = setup
    requests = make_requests(MIXED_LENGTHS, rollouts=4, max_tokens=16, seed=7)
    together = run_engine(engine, requests)
    backwards = run_engine(engine, requests[::-1])
    alone = run_engine(engine, requests[9:10])
    assert {i: c.token_ids for i, c in together.items()} == {
        i: c.token_ids for i, c in backwards.items()
    }
    assert alone[9].token_ids == together[9].token_ids
    moved = [dataclasses.replace(request, seed=request.seed + 10**6) for request in requests]
    again = run_engine(engine, moved)
    assert sum(again[i].token_ids != together[i].token_ids for i in together) > 20
    assert len({together[i].token_ids for i in range(4)}) > 1


def test_a_response_ends_with_the_first_eos_or_at_its_limit(setup, make_requests, run_engine):
    engine, _, _ = setup
    requests = make_requests((5, 11), rollouts=40, max_tokens=60, seed=3)
    requests = [dataclasses.replace(r, max_tokens=1 + r.id % 60) for r in requests]
    completions = run_engine(engine, requests).values()
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert EOS.isdisjoint(completion.token_ids[:-1])
        has_ended = completion.token_ids[-1] in EOS
        assert completion.finish_reason == ("stop" if has_ended else "length")
        assert has_ended or len(completion.token_ids) == completion.request.max_tokens
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.logprobs.dtype == np.float32


def test_only_the_given_ids_end_a_response(setup, make_requests, run_engine):
    engine, model, _ = setup
    assert model.config.eos_token_id == 5
    engine._sampling = dataclasses.replace(engine._sampling, eos_token_ids=frozenset({9}))
    try:
        requests = make_requests((5, 11), rollouts=40, max_tokens=60, seed=4)
        completions = run_engine(engine, requests).values()
    finally:
        engine._sampling = dataclasses.replace(engine._sampling, eos_token_ids=EOS)
    assert any(5 in completion.token_ids for completion in completions)


def test_a_freed_slot_is_refilled_while_others_run(setup, make_requests, run_engine):
    engine, _, _ = setup
    requests = make_requests((6,), rollouts=SLOTS + 1, max_tokens=40, seed=11)
    late = requests.pop()
    requests[0] = dataclasses.replace(requests[0], max_tokens=1)
    expected = run_engine(engine, [*requests, late])
    engine.submit(requests)
    assert engine.free_slots() == 0
    done = []
    while not done:
        done = engine.step()
    assert done[0].request.id == 0
    assert engine.free_slots() == len(done)
    engine.submit([late])
    last_step = {}
    while len(done) < SLOTS + 1:
        completions = engine.step()
        last_step.update({c.request.id: engine.num_steps() for c in completions})
        done += completions
    assert len(set(last_step.values())) > 1
    assert {c.request.id: c.token_ids for c in done} == {
        i: c.token_ids for i, c in expected.items()
    }
    assert engine.step() == []


def test_a_response_continued_in_segments_keeps_the_policy(setup, make_requests, run_engine):
    engine, model, temperature = setup
    segments = make_requests((20, 33), rollouts=3, max_tokens=6, seed=5)
    for _ in range(4):
        completions = run_engine(engine, segments)
        assert max_logprob_gap(list(completions.values()), model, temperature) < 1e-4
        segments = [
            dataclasses.replace(
                request,
                prompt_ids=request.prompt_ids + completions[request.id].token_ids,
                seed=request.seed + 1,
            )
            for request in segments
        ]


def test_weights_are_not_changed_under_running_rollouts(setup, make_requests):
    engine, model, _ = setup
    requests = make_requests((6,), max_tokens=8, seed=20)
    engine.submit(requests)
    with pytest.raises(ValueError, match="state_dict: expected no rollouts under way, got 1"):
        engine.load_weights(model.state_dict().items())
    with pytest.raises(ValueError, match=r"expected no rollouts under way at sleep.*got 1"):
        engine.sleep()
    with pytest.raises(ValueError, match="requests: expected unique ids, got 0 twice"):
        engine.submit(requests)
    while not engine.step():
        pass


def test_sleep_keeps_the_weights_and_takes_new_ones(setup, make_requests, run_engine):
    engine, model, temperature = setup
    requests = make_requests((6, 12), rollouts=4, max_tokens=8, seed=21)
    before = run_engine(engine, requests)
    engine.sleep()
    engine.sleep()
    with pytest.raises(EngineError, match=r"engine: expected wake\(\) before new rollouts"):
        engine.submit(requests)
    engine.wake()
    engine.wake()
    after = run_engine(engine, requests)
    assert [c.token_ids for c in after.values()] == [c.token_ids for c in before.values()]
    engine.sleep()
    change(model)
    engine.load_weights(model.state_dict().items())
    engine.wake()
    completions = list(run_engine(engine, requests).values())
    assert max_logprob_gap(completions, model, temperature) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "request 0: expected at least one prompt token, got none"),
        ({"max_tokens": 125}, r"request 0: expected prompt \+ max_tokens <= 128 .* got 4 \+ 125"),
        ({"prompt_ids": (3, 128)}, r"request 0: expected token ids in 0\.\.127, got 128"),
    ],
    ids=["empty", "too-long", "outside-vocabulary"],
)
def test_requests_that_cannot_run_are_named(setup, make_requests, change, message):
    engine, _, _ = setup
    bad = dataclasses.replace(make_requests((4,))[0], **change)
    with pytest.raises(ValueError, match=f"requests: {message}"):
        engine.submit([bad])
    assert engine.free_slots() == SLOTS
