"""PromptStates: fresh -> seeded -> back-off -> audit -> quarantine, and back by one success."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrpo_fast.exemplars import PromptStates
from xrpo_fast.exemplars.states import STATES


def visit(states, epoch, solved=0, seeded=True, scored=8):
    states.observe_step(0, solved, scored, seeded, epoch)


def drive(states, num_epochs, seeded=True):
    """Visits prompt 0 in each epoch that does not skip it, always failing; gives the story."""
    story = []
    for epoch in range(num_epochs):
        if states.should_skip(0, epoch):
            story.append("skip")
            continue
        is_seeded = seeded and states.should_seed(0, epoch)
        visit(states, epoch, seeded=is_seeded)
        story.append("seed" if is_seeded else "draw")
    return story


def test_a_prompt_that_never_succeeds():
    states = PromptStates(2)
    story = drive(states, 30)
    expected = ["seed"] * 3
    for num_skipped in (1, 2, 4, 8):
        expected += ["skip"] * num_skipped + ["seed"]
    assert story == (expected + ["draw"] * 8)[:30]
    assert states.state(0) == "quarantine"
    assert states.quarantine() == [0]
    assert states.counts() == {
        "fresh": 1,
        "seeded": 0,
        "back-off": 0,
        "audit": 0,
        "quarantine": 1,
    }


@pytest.mark.parametrize(
    ("num_epochs", "state"),
    [
        (0, "fresh"),
        (1, "seeded"),
        (3, "back-off"),
        (21, "back-off"),
        (22, "audit"),
        (24, "audit"),
        (25, "quarantine"),
        (40, "quarantine"),
    ],
    ids=lambda value: str(value),
)
def test_one_success_makes_any_state_fresh(num_epochs, state):
    states = PromptStates(1)
    drive(states, num_epochs)
    assert states.state(0) == state
    visit(states, num_epochs, solved=1, seeded=False)
    assert states.state(0) == "fresh"
    assert states.should_seed(0, num_epochs + 1)
    assert not states.should_skip(0, num_epochs + 1)


def test_unseeded_failures_of_a_fresh_prompt_do_not_count():
    states = PromptStates(1)
    assert drive(states, 20, seeded=False) == ["draw"] * 20
    assert states.state(0) == "fresh"


def test_a_visit_without_scores_changes_nothing():
    states = PromptStates(1)
    drive(states, 2)
    before = states.state_dict()
    visit(states, 2, scored=0)
    assert states.state_dict() == before


@given(visits=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.booleans()), max_size=60))
def test_state_dict_is_exact(visits):
    """Whatever happened, a resumed copy behaves alike from there on."""
    states = PromptStates(5)
    for epoch, (index, solved, seeded) in enumerate(visits):
        states.observe_step(index, solved // 2, 2, seeded, epoch)
    resumed = PromptStates(5)
    resumed.load_state_dict(json.loads(json.dumps(states.state_dict())))
    for epoch in range(len(visits), len(visits) + 20):
        for index in range(5):
            assert states.should_skip(index, epoch) == resumed.should_skip(index, epoch)
            assert states.should_seed(index, epoch) == resumed.should_seed(index, epoch)
            states.observe_step(index, 0, 1, True, epoch)
            resumed.observe_step(index, 0, 1, True, epoch)
    assert states.state_dict() == resumed.state_dict()
    assert sum(states.counts().values()) == 5
    assert set(states.counts()) == set(STATES)


def test_errors():
    states = PromptStates(3)
    with pytest.raises(ValueError, match=r"prompt_index: expected 0\.\.2, got 3"):
        states.should_seed(3, 0)
    with pytest.raises(ValueError, match=r"num_solved: expected 0\.\.num_scored = 1, got 2"):
        states.observe_step(0, 2, 1, False, 0)
    with pytest.raises(ValueError, match="state: expected 3 prompts, got 4"):
        states.load_state_dict({"num_prompts": 4, "records": []})
    with pytest.raises(ValueError, match=r"state: expected one of .* got 'tired'"):
        states.load_state_dict({"num_prompts": 3, "records": [[0, "tired", 1, 0]]})
    with pytest.raises(ValueError, match="num_prompts: expected >= 0, got -1"):
        PromptStates(-1)


def test_a_failure_while_resting_changes_nothing():
    states = PromptStates(1)
    for epoch in range(3):
        visit(states, epoch)
    assert states.should_skip(0, 3)
    for _ in range(20):
        visit(states, 3, seeded=False)
    assert states.state(0) == "back-off"
    assert states.should_seed(0, 4)
    visit(states, 3, solved=1, seeded=False)
    assert states.state(0) == "fresh"
