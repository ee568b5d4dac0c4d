from pathlib import Path

import pytest

from xrpo_fast.config_file import load_config
from xrpo_fast.rewards import answer_checker
from xrpo_fast.rewards.functions import part_names
from xrpo_fast.sources import split_source

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_a_valid_config(path):
    config = load_config(path)
    answer_checker(config.reward.functions, config.reward.options)
    assert part_names(config.reward.functions)
    for source in [config.data.train, *config.data.eval.values()]:
        address, options, _ = split_source(source, config.data.split)
        assert set(options) <= {"split", "seed", "size"}
        if address.endswith((".jsonl", ".parquet")):
            assert (path.parent.parent / address).is_file()
