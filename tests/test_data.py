import json
from pathlib import Path

import pytest

from xrpo_fast.config_file import make_config
from xrpo_fast.data import load_prompts
from xrpo_fast.inputs import eval_names
from xrpo_fast.sources import DataError
from xrpo_fast.tasks import symbols
from xrpo_fast.tasks.policy import build_tokenizer
from xrpo_fast.templates import PromptTemplate

DATA = Path(__file__).parent / "data"


class CharacterTokenizer:
    """One id per character; enough of a tokenizer for prompts."""

    bos_token_id = None
    chat_template = "{{ messages }}"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **_):
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


def load(source, *, chat=False, **options):
    template = PromptTemplate(CharacterTokenizer(), raw=not chat)
    return load_prompts(str(source), **{"template": template, "max_prompt_tokens": 9999, **options})


def write_jsonl(folder, rows, name="set.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


ROWS = [{"question": f"q{i}", "answer": str(i), "extra": i} for i in range(4)]


def test_builtin_symbols():
    template = PromptTemplate(build_tokenizer(), raw=True)
    train = load_prompts("builtin:symbols", template=template, max_prompt_tokens=64)
    test = load_prompts("builtin:symbols", template=template, max_prompt_tokens=64, split="test")
    other = load_prompts("builtin:symbols?seed=1", template=template, max_prompt_tokens=64)
    assert (len(train), len(test)) == (544, 136)
    assert train[0].question == symbols.load()[0]["question"]
    assert train[0].tier in symbols.TIERS
    assert not {p.id for p in train.prompts} & {p.id for p in test.prompts}
    assert len({train.fingerprint, test.fingerprint, other.fingerprint}) == 3


def test_jsonl(tmp_path):
    prompts = load(write_jsonl(tmp_path, ROWS))
    assert [p.question for p in prompts.prompts] == ["q0", "q1", "q2", "q3"]
    second = prompts[1]
    assert (second.index, second.answer, second.columns) == (1, "1", {"extra": 1})
    assert second.token_ids == (ord("q"), ord("1"))
    assert second.id == "set/1"


def test_parquet_equals_jsonl(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "set.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert load(path).prompts == load(write_jsonl(tmp_path, ROWS)).prompts


@pytest.mark.parametrize("saved", ["dataset", "dict", "files"])
def test_folders(tmp_path, saved, require):
    require("datasets")
    import datasets

    folder = tmp_path / "mine"
    if saved == "files":
        folder.mkdir()
        write_jsonl(folder, ROWS, "train.jsonl")
    else:
        rows = datasets.Dataset.from_list(ROWS)
        if saved == "dict":
            rows = datasets.DatasetDict({"train": rows})
        rows.save_to_disk(folder)
    prompts = load(folder)
    assert [p.answer for p in prompts.prompts] == ["0", "1", "2", "3"]
    assert prompts.name == "mine/train"


def test_chat_prompts_and_nested_answers(tmp_path):
    row = {
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
    }
    (prompt,) = load(write_jsonl(tmp_path, [row]), chat=True).prompts
    assert (prompt.question, prompt.answer) == ("1 + 1?", "2")
    assert "".join(map(chr, prompt.token_ids)) == "[user]1 + 1?[assistant]"
    assert prompt.messages == row["prompt"]


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "q", "answer": "a", "solution": "long"},
        {"question": "q", "solution": "a"},
        {"prompt": "q", "label": "a"},
        {"prompt": "q", "ground_truth": "a"},
        {"prompt": "q", "reward_spec": {"method": "rule", "ground_truth": "a"}},
        {"Problem": "q", "Answer": "a"},
    ],
    ids=lambda row: "-".join(row),
)
def test_recognised_columns(tmp_path, row):
    (prompt,) = load(write_jsonl(tmp_path, [row])).prompts
    assert (prompt.question, prompt.answer) == ("q", "a")


def test_column_map(tmp_path):
    row = {"ask": {"text": "q"}, "gold": "a", "uid": "x7", "level": 5, "tests": [1], "answer": "b"}
    columns = {
        "prompt": "ask.text",
        "answer": "gold",
        "id": "uid",
        "tier": "level",
        "cases": "tests",
    }
    (prompt,) = load(write_jsonl(tmp_path, [row]), columns=columns).prompts
    assert (prompt.question, prompt.answer, prompt.tier) == ("q", "a", "5")
    assert prompt.id == "set/x7"
    assert prompt.columns == {"cases": [1], "answer": "b"}


def test_answer_may_be_declared_absent(tmp_path):
    path = write_jsonl(tmp_path, [{"question": "q"}])
    assert load(path, columns={"answer": ""})[0].answer is None


def test_overlong_prompts_are_dropped_and_counted(tmp_path, caplog):
    rows = [{"question": "q" * n, "answer": "a"} for n in (1, 5, 6, 2)]
    prompts = load(write_jsonl(tmp_path, rows), max_prompt_tokens=5)
    assert [len(p.token_ids) for p in prompts.prompts] == [1, 5, 2]
    assert [p.index for p in prompts.prompts] == [0, 1, 2]
    assert [p.id.rpartition("/")[2] for p in prompts.prompts] == ["0", "1", "3"]
    assert prompts.dropped_overlong == 1
    assert "dropped 1 of more than 5 tokens" in caplog.text


def test_exact_duplicates_are_dropped_and_counted(tmp_path):
    rows = [*ROWS, *ROWS, {"question": "q0", "answer": "other"}]
    prompts = load(write_jsonl(tmp_path, rows))
    assert (len(prompts), prompts.dropped_duplicates) == (5, 4)


def test_limit(tmp_path):
    assert len(load(write_jsonl(tmp_path, ROWS), limit=3)) == 3
    assert len(load(write_jsonl(tmp_path, ROWS), limit=0)) == 4


def test_fingerprint_sees_order_answers_and_template(tmp_path):
    base = load(write_jsonl(tmp_path, ROWS))
    assert load(write_jsonl(tmp_path, ROWS)).fingerprint == base.fingerprint
    changed = [
        load(write_jsonl(tmp_path, ROWS[::-1])),
        load(write_jsonl(tmp_path, [*ROWS[:3], {**ROWS[3], "answer": "9"}])),
        load(write_jsonl(tmp_path, ROWS), chat=True),
        load(write_jsonl(tmp_path, ROWS), limit=3),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in changed)}) == 5


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "q", "gold": "a"}], {}, r"columns.prompt: expected one of prompt, question"),
        ([{"text": "q", "gold": "a"}], {}, r"got the columns gold, text; set data.columns.prompt"),
        ([{"question": "q"}], {}, r"data.columns.answer: expected one of answer, solution"),
        (ROWS, {"columns": {"answer": "gold"}}, r"data.columns.answer: expected 'gold' in"),
        (ROWS, {"columns": {"promt": "question"}}, r"data.columns.promt: .*did you mean prompt\?"),
        (ROWS, {"columns": {"Answers": "extra"}}, r"data.columns.Answers: .*did you mean answer\?"),
        ([], {"key": "data.eval.easy"}, r"^data.eval.easy: expected at least one row in"),
        (ROWS, {"max_prompt_tokens": 1, "key": "data.train"}, r"^data.train: expected prompts of"),
        ([], {}, r"expected at least one row in .*set.jsonl', got none"),
        (ROWS, {"max_prompt_tokens": 1}, r"at most 1 tokens .* got 4 longer ones and no other"),
        ([{"question": "", "answer": "a"}], {}, r"row 0 .*expected text or messages, got an empty"),
        ([*ROWS, {"question": "q"}], {}, r"row 4 .*expected the column 'answer' as in the first"),
        ([{**ROWS[0], "id": 1}, {**ROWS[1], "id": 1}], {}, r"expected unique ids .* got 1 twice"),
        ([{"question": [{"role": "user"}], "answer": "a"}], {"chat": True}, r"row 0 of"),
    ],
)
def test_unusable_data(tmp_path, rows, options, message):
    with pytest.raises(DataError, match=message):
        load(write_jsonl(tmp_path, rows), **options)


def test_bad_gold_answer_names_its_row(tmp_path):
    message = r"row 0 of .*set.jsonl'.*invalid literal.* in the column 'answer'; correct or remove"
    with pytest.raises(DataError, match=message):
        load(write_jsonl(tmp_path, [{"question": "q", "answer": "x"}]), check_answer=int)


def test_names_far_from_ours_are_columns_for_rewards(tmp_path):
    columns = {"idx": "extra", "prompt_id": "extra", "tiers": "tiers"}
    rows = [{**row, "tiers": 1} for row in ROWS]
    found = load(write_jsonl(tmp_path, rows), columns=columns)[2].columns
    assert found == {"idx": 2, "prompt_id": 2, "tiers": 1}


def test_moved_data_keeps_ids_and_fingerprint(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    sets = [load(write_jsonl(tmp_path / folder, ROWS)) for folder in ("a", "b")]
    assert sets[0].fingerprint == sets[1].fingerprint
    assert [p.id for p in sets[0].prompts] == [p.id for p in sets[1].prompts]


def test_held_out_sets_of_equal_names_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder, ROWS)
    train = str(tmp_path / "a" / "set.jsonl")
    held_out = {"same": f"{tmp_path}/a/../a/set.jsonl", "other": f"{tmp_path}/b/set.jsonl"}
    values = {"model": {"path": "x"}, "run": {"name": "x"}, "reward": {"functions": ["exact"]}}
    config = make_config(values | {"data": {"train": train, "eval": held_out}})
    # The training file itself is the same set, whose questions the leakage guard finds by id.
    assert eval_names(config) == {"same": "set", "other": "other/set"}


def test_hub_errors_end_with_a_cure(monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(*arguments, **named):
            raise ConnectionError("no route")

    monkeypatch.setattr("xrpo_fast.sources._import_datasets", Datasets)
    with pytest.raises(DataError, match=r"ConnectionError: no route; .*jsonl.*HF_TOKEN"):
        load("owner/name")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", "expected a file, found none at 'missing.jsonl'"),
        ("/no/such/folder", "which is none of them"),
        ("name", "got 'name', which is none of them"),
        ("builtin:symbols?seed=x", "builtin:symbols: invalid literal"),
        ("builtin:symbols?sed=1", r"expected no option \['sed'\] in 'builtin:symbols"),
    ],
)
def test_unknown_source(source, message):
    with pytest.raises(DataError, match=message):
        load(source)


def test_split_in_the_source_wins():
    template = PromptTemplate(build_tokenizer(), raw=True)
    source = "builtin:symbols?split=test"
    prompts = load_prompts(source, template=template, max_prompt_tokens=64, split="train")
    assert len(prompts) == 136
    assert prompts.name.endswith("/test")


def test_unknown_split_of_the_builtin_task():
    with pytest.raises(DataError, match="split: expected 'train' or 'test', got 'dev'"):
        load("builtin:symbols", split="dev")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "q", "answer": "a"}\nnot json\n', "line 2 is not"),
        ("[1, 2]\n", "line 1 is a list"),
    ],
)
def test_broken_jsonl(tmp_path, text, message):
    path = tmp_path / "set.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load(path)


def test_broken_parquet(tmp_path):
    path = tmp_path / "set.parquet"
    path.write_text("not parquet")
    with pytest.raises(DataError, match="expected a Parquet file"):
        load(path)


def test_unknown_split_of_a_saved_folder(tmp_path, require):
    require("datasets")
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match=r"data.split: expected one of train in .*, got 'test'"):
        load(tmp_path / "d", split="test")


def test_byte_order_mark_is_not_part_of_the_data(tmp_path):
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "1 + 1?", "answer": "2"}\n')
    assert len(load(str(path))) == 1


def test_other_encodings_and_numbers_are_named_with_their_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"question": "caf\u00e9?", "answer": "2"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"line 1 is not"):
        load(str(path))
    path.write_text('{"question": 7, "answer": "2"}\n')
    with pytest.raises(DataError, match=r"expected text or a list of messages, got 7.*row 0"):
        load(str(path))
