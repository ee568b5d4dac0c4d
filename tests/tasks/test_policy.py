import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from xrpo_fast.tasks import symbols
from xrpo_fast.tasks.measure import sample_responses, tier_pass_rates, worked_examples
from xrpo_fast.tasks.policy import POLICY_DIR, build_policy, build_tokenizer

DOCUMENT = "?ka:77kaJ663344$?kaba:12kaJ897652baA6071=71$"


@pytest.fixture(scope="module")
def shipped():
    model = AutoModelForCausalLM.from_pretrained(POLICY_DIR, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(POLICY_DIR)


def test_tokenizer_has_one_token_per_symbol_and_keeps_the_text(tmp_path):
    built = build_tokenizer()
    built.save_pretrained(tmp_path)
    for tokenizer in (built, AutoTokenizer.from_pretrained(tmp_path)):
        ids = tokenizer(DOCUMENT)["input_ids"]
        assert len(ids) == len(DOCUMENT) - 6  # six codes of two characters
        assert tokenizer.decode(ids) == DOCUMENT
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.encode("$") == [tokenizer.eos_token_id]
        assert tokenizer.pad_token_id != tokenizer.eos_token_id
        assert tokenizer.chat_template is None


def test_every_question_and_answer_of_a_world_round_trips():
    tokenizer, world = build_tokenizer(), symbols.World(0)
    for record in symbols.load(0):
        text = record["question"] + world.gold(record["question"])
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids


def test_shipped_policy_is_small_and_what_the_script_builds(shipped):
    model, tokenizer = shipped
    assert sum(path.stat().st_size for path in POLICY_DIR.iterdir()) < 1_000_000
    built = build_policy(seed=0)
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in built.named_parameters()
    }
    for key in ("head_dim", "rope_parameters", "tie_word_embeddings", "eos_token_id"):
        assert getattr(model.config, key) == getattr(built.config, key)
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_worked_examples_share_the_hidden_code_and_are_never_held_out():
    world = symbols.World(3)
    train = {r["question"] for r in symbols.load(3)}
    for record in symbols.load(3)[:64] + symbols.load(3, "test"):
        shown = worked_examples(world, record["question"], 2)
        assert len(shown) == 2
        for question, response in shown:
            assert question in train - {record["question"]}
            assert set(symbols.parse_question(question)[0]) & set(record["codes"])
            assert symbols.extract(response) is not None


@pytest.mark.parametrize("seed", [0, 5])
def test_zero_shot_pass_rates_are_graded_by_tier(shipped, seed):
    rates = tier_pass_rates(*shipped, symbols.World(seed), num_samples=8)
    assert rates["easy"] > 0.95
    assert 0.25 < rates["semi"] < 0.6
    assert 0.02 < rates["hard"] < 0.15
    assert rates["vhard"] < 0.06
    assert rates["chain"] < 0.15


@pytest.mark.parametrize("seed", [0, 5])
def test_two_worked_examples_lift_what_the_policy_cannot_know(shipped, seed):
    rates = tier_pass_rates(*shipped, symbols.World(seed), num_exemplars=2, num_samples=4)
    assert rates["hard"] > 0.85
    assert rates["vhard"] > 0.85
    assert rates["chain"] > 0.75
    assert rates["easy"] > 0.95


def test_samples_depend_on_the_seed_alone(shipped):
    model, tokenizer = shipped
    prompts = [r["question"] for r in symbols.load(0)[:8]]
    before = torch.random.get_rng_state()
    first = sample_responses(model, tokenizer, prompts, num_samples=4, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert first == sample_responses(model, tokenizer, prompts, num_samples=4, seed=1)
    assert first != sample_responses(model, tokenizer, prompts, num_samples=4, seed=2)
    assert sum(text.endswith("$") for texts in first for text in texts) >= 30
