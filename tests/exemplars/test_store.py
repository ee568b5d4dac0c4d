"""ExemplarStore: admission, retrieval, ageing, state."""

import json

import pytest

from xrpo_fast.exemplars import ExemplarStore, Success
from xrpo_fast.exemplars.embed import make_embedder
from xrpo_fast.types import Prompt

OPTIONS = {"embedder": "codes", "kind": "generated", "max_similarity": None}


def prompts(questions, prefix="train"):
    return [
        Prompt(id=f"{prefix}-{i}", index=i, question=q, token_ids=(1,), answer="")
        for i, q in enumerate(questions)
    ]


# Three problems of code ka, two of ko (a shared letter is no similarity), one chain of both.
SYMBOLS = ["?ka:77", "?ka:12", "?ka:54", "?ko:33", "?ko:90", "?koka:41"]


def symbols(**options):
    return ExemplarStore(prompts(SYMBOLS), prompts(["?ka:99"], "eval"), **(OPTIONS | options))


def success(prompt_index, response="solved"):
    return Success(prompt_index=prompt_index, response=response, num_tokens=len(response))


def shown(store, prompt_index, step):
    return [exemplar.prompt_id for exemplar in store.retrieve(prompt_index, step)]


def test_empty_corpus_gives_nothing():
    assert symbols().retrieve(0, step=5) == ()


def test_nearest_first_and_never_the_problem_itself():
    store = symbols()
    assert store.admit([success(i) for i in range(6)], step=1) == 6
    assert shown(store, 0, step=2) == ["train-1", "train-2"]
    assert shown(store, 3, step=2) == ["train-4", "train-5"]
    similarities = [exemplar.similarity for exemplar in store.retrieve(3, 2)]
    assert similarities[0] == pytest.approx(1.0, abs=1e-6)
    assert 0.5 <= similarities[1] < 1.0


def test_unsuitable_problems_are_not_shown():
    store = symbols()
    store.admit([success(3), success(4)], step=1)
    assert shown(store, 0, step=2) == []
    assert shown(store, 5, step=2) == ["train-3", "train-4"]


def test_exemplar_carries_the_success():
    store = symbols(num_exemplars=1)
    store.admit([success(1, "oJ663344$")], step=3)
    (exemplar,) = store.retrieve(0, step=4)
    assert (exemplar.question, exemplar.response) == ("?ka:12", "oJ663344$")
    assert (exemplar.num_tokens, exemplar.step) == (9, 3)


def test_a_step_never_sees_its_own_successes():
    store = symbols()
    store.admit([success(1)], step=4)
    assert shown(store, 0, step=4) == []
    assert shown(store, 0, step=5) == ["train-1"]


def test_a_response_larger_than_the_corpus_is_refused():
    store = symbols(max_bytes=100)
    store.admit([success(1, "kept")], step=2)
    assert store.admit([success(1, "x" * 101)], step=3) == 0
    assert store.stats()["refused/too_large"] == 1
    assert store.retrieve(0, step=9)[0].response == "kept"


def test_newer_replaces_older_in_one_slot():
    store = symbols()
    store.admit([success(1, "first")], step=1)
    store.admit([success(1, "second"), success(1, "third")], step=2)
    assert [e.response for e in store.retrieve(0, step=3)] == ["third"]
    assert store.stats()["corpus_size"] == 1
    assert store.stats()["removed/replaced"] == 2


def test_entries_age_out():
    store = symbols(max_age_steps=3)
    store.admit([success(1)], step=1)
    assert shown(store, 0, step=4) == ["train-1"]
    assert shown(store, 0, step=5) == []
    store.admit([], step=4)
    assert store.stats()["corpus_size"] == 0
    assert store.stats()["removed/expired"] == 1


def test_byte_cap_evicts_the_oldest():
    store = symbols(max_bytes=10)
    store.admit([success(1, "ééé")], step=1)
    assert store.stats()["corpus_bytes"] == 6
    store.admit([success(2, "abcd")], step=2)
    assert shown(store, 0, step=3) == ["train-1", "train-2"]
    store.admit([success(3, "abcd")], step=3)
    assert shown(store, 0, step=4) == ["train-2"]
    assert store.stats()["corpus_bytes"] == 8
    assert store.stats()["removed/evicted"] == 1


def test_state_survives_json_and_continues_alike():
    store = symbols(max_age_steps=5, max_bytes=40)
    store.admit([success(1), success(3, "x" * 41), success(4)], step=1)
    store.admit([success(2)], step=2)
    state = json.loads(json.dumps(store.state_dict()))
    resumed = symbols(max_age_steps=5, max_bytes=40)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == store.state_dict()
    later = [success(i, "later" * 2) for i in (0, 5, 3)]
    assert store.admit(later, step=3) == resumed.admit(later, step=3) == 3
    assert resumed.state_dict() == store.state_dict()
    for prompt_index in range(len(SYMBOLS)):
        assert store.retrieve(prompt_index, 4) == resumed.retrieve(prompt_index, 4)


def test_state_of_other_data_is_an_error():
    state = symbols().state_dict()
    other = ExemplarStore(prompts(SYMBOLS[:3]), [], **OPTIONS)
    with pytest.raises(ValueError, match=r"state: expected data .*resume with the data set"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="state: expected version 1, got 0"):
        symbols().load_state_dict(state | {"version": 0})


def test_outside_the_table_agrees_with_the_table():
    store = symbols()
    store.admit([success(i) for i in range(6)], step=1)
    from_table = [store.retrieve(i, 2) for i in range(6)]
    assert store.retrieve_outside(prompts(SYMBOLS, "other"), 2) == from_table
    # A problem is known by its id too.
    renamed = [Prompt(id="train-1", index=0, question="?ka:00", token_ids=(1,), answer="")]
    assert [e.prompt_id for e in store.retrieve_outside(renamed, 2)[0]] == ["train-0", "train-2"]


def test_outside_of_an_empty_corpus():
    assert symbols().retrieve_outside(prompts(["?ka:00", "none"]), 2) == [(), ()]


def test_tables_are_read_back_from_disk(tmp_path, monkeypatch):
    store = symbols(cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2

    def no_embedding(name):
        raise AssertionError(f"embedder {name} was loaded in spite of the cache")

    monkeypatch.setattr("xrpo_fast.exemplars.index.make_embedder", no_embedding)
    cached = symbols(cache_dir=tmp_path)
    for each in (store, cached):
        each.admit([success(i) for i in range(6)], step=1)
    assert [store.retrieve(i, 2) for i in range(6)] == [cached.retrieve(i, 2) for i in range(6)]
    with pytest.raises(AssertionError, match="in spite of the cache"):
        symbols(cache_dir=tmp_path, min_similarity=0.6)


def test_an_embedder_folder_that_changed_makes_new_tables(tmp_path, monkeypatch):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    weights = folder / "weights"
    weights.write_text("old")
    made = []

    def embedder(name):
        made.append(name)
        return make_embedder("codes")

    monkeypatch.setattr("xrpo_fast.exemplars.index.make_embedder", embedder)
    for content, num_made in (("old", 1), ("old", 1), ("trained further", 2)):
        if weights.read_text() != content:
            weights.write_text(content)
        symbols(cache_dir=cache, embedder=str(folder))
        assert len(made) == num_made


def test_damaged_cache_warns_and_is_remade(tmp_path):
    symbols(cache_dir=tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:50])
    with pytest.warns(UserWarning, match="damaged cache"):
        store = symbols(cache_dir=tmp_path)
    store.admit([success(1)], step=1)
    assert shown(store, 0, step=2) == ["train-1"]
    assert not list(tmp_path.glob(".*part"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_exemplars": 0}, "num_exemplars: expected >= 1, got 0"),
        ({"min_similarity": 0.0}, "min_similarity: expected 0 < s <= 1, got 0.0"),
        ({"max_similarity": 0.4}, "max_similarity: expected more than min_similarity = 0.5"),
        ({"max_age_steps": 0}, "max_age_steps: expected >= 1, got 0"),
        ({"max_bytes": 0}, "max_bytes: expected >= 1, got 0"),
        ({"kind": "math"}, "kind: expected 'natural' or 'generated', got 'math'"),
        ({"embedder": ""}, "embedder: expected 'tfidf', 'codes' or"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        symbols(**options)


def test_index_must_be_the_position():
    shuffled = prompts(SYMBOLS)[::-1]
    with pytest.raises(ValueError, match="prompts: expected index 0 at position 0, got 5"):
        ExemplarStore(shuffled, [], **OPTIONS)
    with pytest.raises(ValueError, match=r"prompt_index: expected 0\.\.5, got 6"):
        symbols().admit([success(6)], step=1)


def test_empty_data_set():
    store = ExemplarStore([], [], embedder="tfidf")
    assert store.admit([], step=1) == 0
    assert store.stats()["corpus_size"] == 0
