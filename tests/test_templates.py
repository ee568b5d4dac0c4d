from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from xrpo_fast.config_file import make_config
from xrpo_fast.inputs import make_template
from xrpo_fast.tasks import symbols
from xrpo_fast.tasks.policy import build_tokenizer
from xrpo_fast.templates import PromptTemplate, TemplateError, cut_exemplar
from xrpo_fast.types import Exemplar, Prompt

# As in the templates of real models: one writes the BOS itself, the other drops the thoughts of
# earlier assistant turns.
LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QWEN_LIKE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(chat_template=None, adds_bos=True):
    """A byte-level tokenizer that puts a BOS in front of every text, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1, **{c: i for i, c in enumerate(alphabet, start=2)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def exemplar(question, response):
    return Exemplar(prompt_id="e", question=question, response=response, num_tokens=1, step=1)


def prompt(question, messages=None):
    return Prompt(id="p", index=0, question=question, token_ids=(), answer="", messages=messages)


def test_chat_template_is_rendered_once_with_one_bos():
    tokenizer = make_tokenizer(LLAMA_LIKE)
    template = PromptTemplate(tokenizer, instruction="Box it.", system_prompt="Be brief.")
    ids = template.render("1 + 1?")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == (
        "<bos><system>Be brief.<end><user>1 + 1?\n\nBox it.<end><assistant>"
    )


def test_no_bos_is_added_where_the_template_writes_none():
    tokenizer = make_tokenizer(QWEN_LIKE)
    assert tokenizer.decode(PromptTemplate(tokenizer).render("a")) == "<user>a<end><assistant>"


def test_messages_keep_their_turns():
    tokenizer = make_tokenizer(QWEN_LIKE)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    ids = PromptTemplate(tokenizer, instruction="i").render(messages)
    assert tokenizer.decode(ids) == "<user>a<end><assistant>b<end><user>c\n\ni<end><assistant>"
    assert messages[-1]["content"] == "c"


@pytest.mark.parametrize("text", ["abc", "<bos>abc"])
def test_raw_text_has_exactly_one_bos(text):
    tokenizer = make_tokenizer()
    assert tokenizer.decode(PromptTemplate(tokenizer, raw=True).render(text)) == "<bos>abc"


def test_raw_text_of_a_tokenizer_without_bos():
    tokenizer = make_tokenizer(adds_bos=False)
    ids = PromptTemplate(tokenizer, raw=True, instruction="i").render("abc")
    assert tokenizer.decode(ids) == "abc\n\ni"


def test_builtin_task_renders_the_bare_question():
    tokenizer = build_tokenizer()
    template = PromptTemplate(tokenizer, raw=True, seeded_builder=symbols.seeded_prompt)
    question = symbols.load()[0]["question"]
    assert template.render(question) == tuple(tokenizer(question)["input_ids"])
    seeded = template.render_seeded(prompt(question), [exemplar("?ka:77", "kaJ663344$")])
    assert tokenizer.decode(seeded) == f"?ka:77kaJ663344${question}"


def test_seeded_chat_prompt_is_one_user_turn_that_keeps_the_reasoning():
    tokenizer = make_tokenizer(QWEN_LIKE)
    template = PromptTemplate(tokenizer, instruction="Box it.", system_prompt="s")
    ids = template.render_seeded(
        prompt("3 + 3?"),
        [
            exemplar("1 + 1?", "<think>one more</think>\\boxed{2}"),
            exemplar("2 + 2?", "\\boxed{4}"),
        ],
    )
    text = tokenizer.decode(ids)
    assert text.count("<user>") == text.count("<end><assistant>") == 1
    assert text.startswith("<system>s<end><user>")
    assert "Problem:\n1 + 1?\n\nSolution:\n<think>one more</think>\\boxed{2}\n\n" in text
    assert text.index("1 + 1?") < text.index("2 + 2?") < text.index("3 + 3?")
    assert text.endswith("3 + 3?\n\nBox it.<end><assistant>")
    assert text.count("Box it.") == 1


def test_seeded_chat_prompt_keeps_earlier_turns():
    tokenizer = make_tokenizer(QWEN_LIKE)
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]
    ids = PromptTemplate(tokenizer).render_seeded(prompt("q", messages), [exemplar("a", "b")])
    text = tokenizer.decode(ids)
    assert text.startswith("<system>own<end><user>Here are similar problems")
    assert text.endswith("q<end><assistant>")


def test_seeded_prompt_without_exemplars_is_the_prompt():
    template = PromptTemplate(make_tokenizer(QWEN_LIKE), instruction="i")
    assert template.render_seeded(prompt("q"), []) == template.render("q")


def test_seeded_raw_prompt_is_a_few_shot_document():
    tokenizer = make_tokenizer()
    template = PromptTemplate(tokenizer, raw=True, instruction="i")
    ids = template.render_seeded(prompt("q"), [exemplar("a", "b")])
    assert tokenizer.decode(ids) == "<bos>a\n\ni\nb\n\nq\n\ni"


@pytest.mark.parametrize(("suffix", "expected"), [("", False), ("<think>\n", True)])
def test_prefilled_thought_is_recognised(suffix, expected):
    tokenizer = make_tokenizer(QWEN_LIKE + suffix)
    assert PromptTemplate(tokenizer).prefills_think is expected


def test_chat_options_reach_the_template():
    tokenizer = make_tokenizer("{{ messages[0].content }}{% if enable_thinking %}T{% endif %}")
    data = {"train": "my.jsonl", "chat_options": {"enable_thinking": True}}
    template = make_template(make_config({"data": data}), tokenizer, SimpleNamespace())  # pyright: ignore
    assert tokenizer.decode(template.render("a")) == "aT"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, '^data.template: expected a tokenizer with a chat.*data.template = "raw"'),
        ({"raw": True, "system_prompt": "s"}, "data.system_prompt: expected none with a raw"),
        ({"raw": True, "chat_options": {"a": 1}}, "data.chat_options: expected none with a raw"),
    ],
)
def test_unusable_options(arguments, message):
    with pytest.raises(TemplateError, match=message):
        PromptTemplate(make_tokenizer(), **arguments)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "expected the last message from 'user', got 'no message'"),
        ([{"role": "assistant", "content": "a"}], "from 'user', got 'assistant'"),
        ([{"role": "user"}], "expected messages with a role and a text content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a role and a text content"),
        (["text"], "a role and a text content"),
    ],
)
def test_bad_messages(messages, message):
    with pytest.raises(TemplateError, match=message):
        PromptTemplate(make_tokenizer(QWEN_LIKE)).render(messages)


def test_chat_messages_need_a_chat_template():
    with pytest.raises(TemplateError, match="expected text with a raw template, got chat messages"):
        PromptTemplate(make_tokenizer(), raw=True).render([{"role": "user", "content": "a"}])


def test_two_system_prompts_are_an_error():
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(TemplateError, match="expected data without system messages"):
        PromptTemplate(make_tokenizer(QWEN_LIKE), system_prompt="s").render(messages)


@pytest.mark.parametrize(
    ("num_tokens", "limit", "expected"),
    [
        (10, 10, (list(range(10)), False)),
        (10, 5, None),
        (255, 300, (list(range(255)), False)),
        (300, 255, None),
        (300, 256, ([*range(153), *range(197, 300)], True)),
        (1000, 500, ([*range(300), *range(800, 1000)], True)),
        (0, 0, ([], False)),
    ],
)
def test_cut_exemplar(num_tokens, limit, expected):
    assert cut_exemplar(range(num_tokens), limit) == (
        None if expected is None else (tuple(expected[0]), expected[1])
    )
