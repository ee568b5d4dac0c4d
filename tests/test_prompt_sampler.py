import json

import pytest

from xrpo_fast.prompt_sampler import PromptSampler


def take(sampler, *sizes):
    return [sampler.next_batch(size) for size in sizes]


def test_it_takes_every_prompt_once_per_epoch():
    sampler = PromptSampler(12, seed=3)
    first, second = take(sampler, 4, 4, 4), take(sampler, 4, 4, 4)
    for epoch in (first, second):
        assert sorted(index for batch in epoch for index in batch) == list(range(12))
    assert first != second
    assert take(PromptSampler(12, seed=4), 4, 4, 4) != first
    assert take(PromptSampler(12, seed=3), 4, 4, 4) == first


def test_it_keeps_the_tail_and_never_repeats_within_a_batch():
    sampler = PromptSampler(7, seed=0)
    batches = take(sampler, *[5] * 70)
    assert all(len(set(batch)) == 5 for batch in batches)
    counts = [sum(batch.count(index) for batch in batches) for index in range(7)]
    assert counts == [50] * 7


def test_the_epoch_is_that_of_the_next_prompt():
    sampler = PromptSampler(3, seed=0)
    epochs = []
    for _ in range(4):
        sampler.next_batch(2)
        epochs.append(sampler.epoch)
    assert epochs == [0, 1, 1, 2]


def test_a_prompt_keeps_the_epoch_of_its_draw():
    sampler = PromptSampler(10, seed=0)
    take(sampler, 4, 4)
    batch = sampler.next_batch(4)
    assert [sampler.epoch_of(index) for index in batch] == [0, 0, 1, 1]
    assert sampler.epoch == 1
    sampler.give_back(batch[:2])
    resumed = PromptSampler(10, seed=99)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert resumed.next_batch(3)[:2] == batch[:2]
    assert [resumed.epoch_of(index) for index in batch[:2]] == [0, 0]


def test_it_takes_back_what_was_not_used():
    sampler, plain = PromptSampler(5, seed=1), PromptSampler(5, seed=1)
    order = plain.next_batch(5)
    assert sampler.next_batch(4) == order[:4]
    sampler.give_back(order[2:4])
    assert sampler.next_batch(2) == order[2:4]
    sampler.give_back(order[3:4])
    assert sampler.next_batch(2) == [order[3], order[4]]
    # Given back and due in the next epoch as well: twice in the order, never twice in a batch.
    sampler.give_back(order)
    batches = [sampler.next_batch(4) for _ in range(5)]
    assert all(len(set(batch)) == 4 for batch in batches)
    assert sorted(index for batch in batches for index in batch) == sorted(order * 4)


@pytest.mark.parametrize("num_taken", [0, 1, 3, 7])
def test_it_resumes_exactly(num_taken):
    sampler = PromptSampler(7, seed=5)
    take(sampler, *[5] * num_taken)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = PromptSampler(7, seed=99)
    resumed.load_state_dict(state)
    assert take(resumed, *[5] * 20) == take(sampler, *[5] * 20)


def test_it_rejects_what_cannot_be():
    with pytest.raises(ValueError, match="num_prompts: expected >= 1, got 0"):
        PromptSampler(0, seed=0)
    with pytest.raises(ValueError, match=r"k: expected 1..3, the number of prompts, got 4"):
        PromptSampler(3, seed=0).next_batch(4)
    with pytest.raises(ValueError, match="expected a position in 3 prompts, got one in 4"):
        PromptSampler(3, seed=0).load_state_dict(PromptSampler(4, seed=0).state_dict())
