from collections import Counter, defaultdict

import pytest
import torch

from xrpo_fast.tasks import symbols
from xrpo_fast.tasks.documents import DocumentWriter
from xrpo_fast.tasks.muon import Muon, orthogonalise
from xrpo_fast.tasks.policy import build_tokenizer
from xrpo_fast.tasks.warmup import NUM_STEPS, batches, main, pack, warm_up


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def turns(document):
    """(question, response, tokens of the response that carry loss) of each turn."""
    starts = [i for i, token in enumerate(document.tokens) if token == "?"]
    for start, end in zip(starts, [*starts[1:], len(document.tokens)], strict=True):
        split = document.tokens.index(":", start) + 3
        with_loss = [
            document.tokens[i] for i in range(start, end) if document.has_loss[i] and i >= split
        ]
        assert not any(document.has_loss[start:split])
        yield "".join(document.tokens[start:split]), "".join(document.tokens[split:end]), with_loss


def test_every_turn_is_answered_right_by_the_rules_that_it_names():
    writer = DocumentWriter(0)
    for document in [writer.single_turn() for _ in range(200)] + [
        writer.several_turns(0.5) for _ in range(200)
    ]:
        bound = {}
        for question, response, _ in turns(document):
            codes, digits = symbols.parse_question(question)
            named = [symbols.RULES.index(letter) for letter in response if letter in symbols.RULES]
            expected = symbols.respond(codes, named, digits, has_equals="=" in response)
            assert response == expected
            for code, rule in zip(codes, named, strict=True):
                assert bound.setdefault(code, rule) == rule


def test_a_free_code_s_first_rule_carries_no_loss_where_rules_are_uniform():
    writer = DocumentWriter(1)
    hidden = shown = 0
    for _ in range(300):
        document = writer.several_turns(1.0)
        heard, is_few_shot = set(), False
        for question, response, with_loss in turns(document):
            codes, _ = symbols.parse_question(question)
            first_free = [c for c in codes if c not in heard and c in symbols.FREE_CODES]
            heard |= set(codes)
            missing = Counter(response) - Counter("".join(with_loss))
            if sum(missing.values()):
                assert len(missing) == len(first_free) == 1
                assert set(missing) <= set(symbols.RULES)
                hidden, is_few_shot = hidden + 1, True
            else:
                assert not (first_free and is_few_shot)
                shown += 1
    assert hidden > 200
    assert shown > 500


def test_the_warm_up_says_nothing_of_a_free_code_beyond_the_prior():
    writer, prior = DocumentWriter(2), symbols.rule_prior()
    counts = defaultdict(Counter)
    for _ in range(10_000):
        for question, response, _ in turns(writer.single_turn()):
            codes, _ = symbols.parse_question(question)
            letters = [letter for letter in response if letter in symbols.RULES]
            for code, letter in zip(codes, letters, strict=True):
                counts[code][letter] += 1
    for code in symbols.FREE_CODES:
        total = sum(counts[code].values())
        assert total > 50
        for letter, p in zip(symbols.RULES, prior, strict=True):
            sigma = (total * p * (1 - p)) ** 0.5
            assert abs(counts[code][letter] - total * p) < 5 * sigma + 1, (code, letter)
    for code, rule in symbols.KNOWN_RULES.items():
        assert set(counts[code]) == {symbols.RULES[rule]}
    for code, rule in symbols.SEMI_RULES.items():
        frac = symbols.SEMI_BINDING_FRAC[code]
        right = counts[code][symbols.RULES[rule]] / sum(counts[code].values())
        assert right == pytest.approx(frac + (1 - frac) * prior[rule], abs=0.08)


def test_curriculum_starts_with_single_turns_and_has_the_promised_steps():
    made = list(batches(seed=0, num_steps=50))
    assert len(made) == 50
    lengths = [max(sum(t == "?" for t in d.tokens) for d in step) for step in made]
    assert lengths[:10] == [1] * 10
    assert min(lengths[10:]) >= 3
    assert NUM_STEPS >= 1000


def test_pack_pads_on_the_right_and_hides_what_carries_no_loss():
    writer, token_ids = DocumentWriter(0), build_tokenizer().get_vocab()
    documents = [writer.single_turn() for _ in range(8)]
    ids, targets = pack(documents, token_ids)
    for document, row, target in zip(documents, ids.tolist(), targets.tolist(), strict=True):
        length = len(document.tokens)
        assert row[:length] == [token_ids[token] for token in document.tokens]
        assert set(row[length:]) <= {token_ids["<pad>"]}
        assert set(target[length:]) <= {-100}
        assert [t != -100 for t in target[:length]] == list(document.has_loss)


@pytest.mark.parametrize("shape", [(64, 128), (160, 64), (64, 64)], ids=["wide", "tall", "square"])
def test_orthogonalise_brings_singular_values_near_one(shape):
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(3, *shape, dtype=torch.float64), full_matrices=False)
    matrices = u @ torch.diag(torch.linspace(0.1, 1, 64, dtype=torch.float64)) @ vh
    made = orthogonalise(matrices)
    # The singular vectors stay; the quintic's fixed band is about 0.7 to 1.2.
    values = torch.diagonal(u.mT @ made @ vh.mT, dim1=-2, dim2=-1)
    assert values.min() > 0.6
    assert values.max() < 1.3
    torch.testing.assert_close(u @ torch.diag_embed(values) @ vh, made)
    torch.testing.assert_close(orthogonalise(matrices * 100), made)


def test_muon_steps_follow_their_formula():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
    other = torch.nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
    optimizer = Muon([weight, other], lr=0.1, momentum=0.9)
    expected, momentum = weight.detach().clone(), torch.zeros_like(weight)
    for _ in range(3):
        weight.grad, other.grad = torch.randn_like(weight), torch.randn_like(other)
        momentum = 0.9 * momentum + weight.grad
        direction = orthogonalise((weight.grad + 0.9 * momentum)[None])[0]
        expected = expected - 0.1 * 2**0.5 * direction
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.usefixtures("one_thread")
def test_a_short_warm_up_learns_and_is_deterministic():
    steps = []
    model, losses = warm_up(seed=3, num_steps=25, report=lambda step, loss: steps.append(step))
    again, losses_again = warm_up(seed=3, num_steps=25)
    assert steps == list(range(25))
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0
    assert losses == losses_again
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert warm_up(seed=4, num_steps=1)[1][0] != losses[0]


@pytest.mark.usefixtures("one_thread")
def test_command_writes_a_loadable_policy_and_its_pass_rates(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    main(["--out", str(tmp_path), "--steps", "2", "--world-seed", "4", "--samples", "1"])
    shown = capsys.readouterr().out
    assert "world 4" in shown
    assert all(tier in shown for tier in symbols.TIERS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float16
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "$"


def test_bad_number_of_steps_is_named():
    with pytest.raises(ValueError, match="num_steps: expected at least 1, got 0"):
        warm_up(num_steps=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--samples", "-1"], "--samples: expected at least 1, got -1"),
        (["--world-seed", "-2"], "--world-seed: expected an integer >= 0, got -2"),
    ],
)
def test_bad_arguments_of_the_command_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
