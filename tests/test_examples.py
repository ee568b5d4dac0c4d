from pathlib import Path

import pytest

from xrpo_fast.config_file import load_config
from xrpo_fast.metrics import read_metrics
from xrpo_fast.rewards import answer_checker
from xrpo_fast.rewards.functions import part_names
from xrpo_fast.sources import split_source
from xrpo_fast.study.study_file import load_study
from xrpo_fast.train import main

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


def test_quickstart_has_examples_to_show_after_step_3(tmp_path):
    """Its prompts differ in digits alone: a rule of similarity would block all of them."""
    short = {
        "run.output_dir": str(tmp_path),
        "run.steps": "3",
        "eval.max_prompts": "2",
        "eval.k": "[1]",
        "eval.final_samples": "1",
    }
    flags = [word for key, value in short.items() for word in (f"--{key}", value)]
    assert main([str(FOLDER / "quickstart.toml"), *flags]) == 0
    last = read_metrics(tmp_path / "quickstart" / "metrics.jsonl")[3]
    # About half of the 96 prompts are solved; each gives one example.
    assert last["icl/corpus_size"] > 15
    assert last["icl/seeded_prompts"] > 0
