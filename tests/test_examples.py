from pathlib import Path

import pytest

from xrpo_fast.config_file import load_config
from xrpo_fast.rewards import answer_checker
from xrpo_fast.rewards.functions import part_names
from xrpo_fast.sources import split_source
from xrpo_fast.study.study_file import load_study

FOLDER = Path(__file__).parent.parent / "examples"
STUDIES = sorted(FOLDER.glob("study_*.toml"))
CONFIGS = sorted(set(FOLDER.glob("*.toml")) - set(STUDIES))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_example_is_a_valid_config(path):
    config = load_config(path)
    answer_checker(config.reward.functions, config.reward.options)
    assert part_names(config.reward.functions)
    for source in [config.data.train, *config.data.eval.values()]:
        address, options, _ = split_source(source, config.data.split)
        assert set(options) <= {"split", "seed", "size"}
        if address.endswith((".jsonl", ".parquet")):
            assert (path.parent.parent / address).is_file()


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_study_resolves(path):
    """Every arm's configuration is built, and the arms may be compared."""
    study = load_study(path)
    assert {run.arm for run in study.runs} == set(study.arms)
