from transformers import AutoTokenizer

from xrpo_fast.tasks import symbols
from xrpo_fast.tasks.policy import build_tokenizer

DOCUMENT = "?ka:77kaJ663344$?kaba:12kaJ897652baA6071=71$"


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
        text = symbols.seeded_prompt(record["question"], []) + world.gold(record["question"])
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
