import re

import pytest

from tests.study.conftest import BASE
from xrpo_fast.config import ConfigError
from xrpo_fast.study.fairness import speed_differences
from xrpo_fast.study.study_file import load_study


def test_arms_and_seeds_become_runs_seed_by_seed(write_study, tmp_path):
    head = """
[common]
optim.learning_rate = 1e-3
[per_seed]
"data.train" = "builtin:symbols?seed={seed}"
"""
    arms = """
[arms.xrpo]
[arms.gspo]
algorithm = "gspo"
seeds = 1
"loss.clip_low" = 0.03
loss.clip_high = 0.04
"""
    study = load_study(write_study(head, arms))
    assert [run.name for run in study.runs] == ["xrpo-seed0", "gspo-seed0", "xrpo-seed1"]
    _, gspo, last = (run.config for run in study.runs)
    assert (gspo.loss.clip_low, gspo.loss.clip_high, gspo.optim.learning_rate) == (0.03, 0.04, 1e-3)
    assert gspo.planner.allocation == "uniform"
    assert (last.run.seed, last.data.train) == (1, "builtin:symbols?seed=1")
    assert study.runs[0].path == tmp_path / "out" / "xrpo-seed0"
    assert study.reference == "xrpo"


def test_a_table_of_held_out_sets_is_one_value(write_study):
    """Names may hold dots; a later table replaces an earlier one, an empty one too."""
    base = BASE + '[data.eval]\nold = "old.jsonl"\n'
    head = """
eval_set = "math.v1"
[common.data]
train = "train.jsonl"
eval = {"math.v1" = "math.jsonl", other = "o.jsonl"}
"""
    runs = load_study(write_study(head, base=base)).runs
    assert all(
        run.config.data.eval == {"math.v1": "math.jsonl", "other": "o.jsonl"} for run in runs
    )
    runs = load_study(write_study("[common]\ndata.eval = {}", base=base)).runs
    assert all(run.config.data.eval == {} for run in runs)


def test_a_table_may_hold_the_seed(write_study):
    head = """
eval_set = "math.v1"
[per_seed.data]
train = "train{seed}.jsonl"
eval = {"math.v1" = "math{seed}.jsonl", other = "o.jsonl"}
"""
    found = [run.config.data.eval for run in load_study(write_study(head, "[arms.xrpo]")).runs]
    assert found == [{"math.v1": f"math{seed}.jsonl", "other": "o.jsonl"} for seed in (0, 1)]


def test_a_key_below_a_table_stays_with_its_arm(write_study):
    head = """
eval_set = "a"
[common.reward]
functions = ["math"]
[common.data]
train = "train.jsonl"
eval = {a = "a.jsonl"}
"""
    arms = """[arms.xrpo]\n'data.eval.b' = "b.jsonl"\n[arms.grpo]\nalgorithm = "grpo"\n"""
    with pytest.raises(ConfigError, match=r"arms.grpo: expected data.eval = {'a': 'a.jsonl', 'b'"):
        load_study(write_study(head, arms))


@pytest.mark.parametrize(
    ("head", "arms", "message"),
    [
        ("sed = 3", None, "sed: unknown key in the study file; did you mean seeds?"),
        ("seeds = [0, 0]", None, "seeds: expected different numbers, got [0, 0]"),
        ("seeds = []", None, "seeds: expected at least 1 item"),
        ("seeds = [-1]", None, "seeds.0: expected greater than or equal to 0, got -1"),
        ("targets = [90]", None, "targets: expected accuracies in (0, 1], got 90.0"),
        (
            'reference = "xrpp"',
            None,
            "reference: expected an arm, got 'xrpp'; did you mean 'xrpo'?",
        ),
        ('eval_set = "test"', None, "eval_set: expected one of the base config's held-out sets"),
        ('base = "no.toml"', None, "base: expected an existing file, got"),
        ("parallel = 0", None, "parallel: expected greater than or equal to 1, got 0"),
        (
            "[per_seed]\nrun.steps = 3",
            None,
            "per_seed.run.steps: expected a text that holds {seed}",
        ),
        ("[common]\nrun.seed = 3", None, "arms.xrpo: expected no run.seed, which the study sets"),
        ("", "[arms.'a/b']", "arms: expected names of letters, digits"),
        ("", "[arms.a]\nseeds = 3", "arms.a.seeds: expected how many of the study's 2 seeds"),
        ("", "[arms.a]\nrun.name = 'x'", "arms.a: expected no run.name, which the study sets"),
        ("", "[arms.a]\nloss.clip = 1", "arms.a: loss.clip: unknown key in section [loss]"),
        ("", "[arms.a]\nalgorithm = 'ppo'", "arms.a: algorithm: expected one of"),
        ("", "", "arms: expected a value, got none"),
    ],
)
def test_bad_study_file_is_an_error_that_names_the_key(write_study, head, arms, message):
    given = {} if arms is None else {"arms": arms}
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_study(write_study(head, **given))


@pytest.mark.parametrize(
    ("line", "key", "values"),
    [
        ("run.steps = 5", "run.steps", ("4", "5")),
        ("eval.final_samples = 4", "eval.final_samples", ("2", "4")),
        ("eval.max_prompts = 5", "eval.max_prompts", ("6", "5")),
        ("rollout.max_response_tokens = 20", "rollout.max_response_tokens", ("36", "20")),
        ("data.train = 'builtin:symbols?seed=7'", "data.train", ("builtin:symbols", "seed=7")),
        ("model.path = 'elsewhere'", "model.path", ("builtin:symbols", "elsewhere")),
        ("data.eval.more = 'x.jsonl'", "data.eval", ("{}", "{'more': 'x.jsonl'}")),
        ('data.eval = {"more.v1" = "x.jsonl"}', "data.eval", ("{}", "{'more.v1': 'x.jsonl'}")),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(write_study, line, key, values):
    with pytest.raises(ConfigError) as caught:
        load_study(write_study("", f"[arms.xrpo]\n[arms.other]\n{line}"))
    text = str(caught.value)
    assert text.startswith(f"arms.other: expected {key} = ")
    assert "as in arms.xrpo" in text
    assert all(value in text for value in values)


def test_budget_is_the_product_of_prompts_and_rollouts(write_study):
    same = "rollout.prompts_per_step = 6\nrollout.rollouts_per_prompt = 12"
    assert len(load_study(write_study("", f"[arms.xrpo]\n[arms.other]\n{same}")).runs) == 4
    with pytest.raises(ConfigError, match=r"rollouts_per_prompt = 72 as in arms.xrpo, got 96"):
        load_study(write_study("", "[arms.xrpo]\n[arms.o]\nrollout.rollouts_per_prompt = 8"))


def test_runs_side_by_side_need_their_threads_named(write_study):
    with pytest.raises(ConfigError, match=r"parallel: expected run.threads to be set"):
        load_study(write_study("parallel = 2\n[common]\nrun.threads = 0"))


def test_other_engines_are_not_compared_in_seconds(write_study):
    study = load_study(write_study("", "[arms.xrpo]\n[arms.v]\nrollout.engine = 'vllm'"))
    assert speed_differences(study) == {
        "v": "v: seconds are not compared to xrpo's: rollout.engine = 'vllm' (there "
        "'transformers')."
    }
