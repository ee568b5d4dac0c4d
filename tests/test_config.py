"""The configuration: presets, overrides, and messages that name the key and the cure."""

import re

import pytest

from xrpo_fast.config import Algorithm, Config, ConfigError, Section
from xrpo_fast.config_file import (
    FOREIGN_KEYS,
    OTHER_UNITS,
    dump_config,
    load_config,
    make_config,
    preset_values,
    valid_keys,
)

ALGORITHMS = Algorithm.__args__


@pytest.fixture
def write(tmp_path):
    """write(text) -> path of a config file that holds it."""

    def to_file(text: str, name: str = "my_run.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return to_file


def test_preset_lies_beneath_file_beneath_overrides(write):
    path = write('algorithm = "xrpo"\n[novelty]\nweight = 1.5\n[loss]\nclip_low = 0.01\n')
    config = load_config(path, [("loss.clip_low", "0.02"), ("optim.learning_rate", "2e-6")])
    assert config.loss.clip_low == 0.02, "the override wins"
    assert config.novelty.weight == 1.5, "the file wins over the preset"
    assert config.loss.clip_high == 4e-4, "the preset stands where the file says nothing"
    assert config.novelty.enabled, "a section of the file keeps the preset's other keys"
    assert config.optim.learning_rate == 2e-6


def test_override_may_change_the_algorithm_and_with_it_the_preset(write):
    path = write('algorithm = "xrpo"\n')
    assert load_config(path).icl.enabled
    config = load_config(path, [("algorithm", "grpo")])
    assert config.loss.objective == "grpo"
    assert not config.icl.enabled


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_preset_loads_and_names_known_keys_only(algorithm):
    config = make_config({"algorithm": algorithm})
    for section, values in preset_values(algorithm).items():
        for key, value in values.items():
            assert getattr(getattr(config, section), key) == value


def test_presets_hold_the_constants_of_their_papers():
    gspo, dapo, xrpo = (make_config({"algorithm": name}) for name in ("gspo", "dapo", "xrpo"))
    assert (gspo.loss.clip_low, gspo.loss.clip_high) == (3e-4, 4e-4)
    assert gspo.optim.updates_per_step == 4
    assert (dapo.loss.clip_low, dapo.loss.clip_high, dapo.loss.dual_clip) == (0.2, 0.28, 10)
    assert (xrpo.novelty.weight, xrpo.novelty.clip, xrpo.icl.num_exemplars) == (2.5, 0.5, 2)
    assert (xrpo.planner.rounds, xrpo.planner.exploration) == (2, 0.1)
    assert make_config({"algorithm": "dr_grpo"}).loss.scale == "none"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dump_round_trips(write, algorithm):
    path = write(
        f'algorithm = "{algorithm}"\n'
        '[run]\nname = "a \\"quoted\\" name"\noutput_dir = "some where"\n'
        '[data]\neval = {aime = "aime.jsonl"}\ncolumns = {prompt = "question"}\n'
        '[reward]\nfunctions = ["exact", "math"]\nweights = [0.5, 1.0]\nfull_reward = 1.5\n'
    )
    config = load_config(path)
    assert load_config(write(dump_config(config), "again.toml")) == config


def test_run_name_defaults_to_the_file_stem(write):
    assert load_config(write("", "first_try.toml")).run.name == "first_try"
    assert load_config(write('[run]\nname = "other"\n')).run.name == "other"
    assert load_config(write(""), [("run.name", "third")]).run.name == "third"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2e-6", 2e-6),
        ("3", 3.0),
    ],
)
def test_override_numbers(write, text, expected):
    assert load_config(write(""), [("optim.learning_rate", text)]).optim.learning_rate == expected


def test_override_lists_booleans_and_plain_words(write):
    config = load_config(
        write(""),
        [
            ("eval.k", "[1, 8]"),
            ("icl.enabled", "false"),
            ("model.path", "my-org/My-Model-1.5B"),
            ("data.eval.aime", "aime.jsonl"),
        ],
    )
    assert config.eval.k == [1, 8]
    assert config.icl.enabled is False
    assert config.model.path == "my-org/My-Model-1.5B"
    assert config.data.eval == {"aime": "aime.jsonl"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": {"clip_lo": 0.1}}, "loss.clip_lo: unknown key in section [loss]; did you mean "
         "loss.clip_low?"),
        ({"optim": {"learning_rat": 1}}, "optim.learning_rat: unknown key in section [optim]; "
         "did you mean optim.learning_rate?"),
        ({"loss": {"temperature": 1}}, "did you mean rollout.temperature?"),
        ({"learning_rate": 1}, "learning_rate: unknown key at the top level; did you mean "
         "optim.learning_rate?"),
        ({"loss": {"zzzzqq": 1}}, "loss.zzzzqq: unknown key in section [loss]; xrpo_fast/config"),
    ],
    ids=["typo", "one-letter", "wrong-section", "no-section", "nothing-near"],
)  # fmt: skip
def test_unknown_key_names_the_nearest_valid_one(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(values)


@pytest.mark.parametrize(
    ("section", "key", "ours"),
    [
        ("", "num_generations", "rollout.rollouts_per_prompt"),
        ("rollout", "n", "rollout.rollouts_per_prompt"),
        ("rollout", "n_samples_per_prompt", "rollout.rollouts_per_prompt"),
        ("", "group_size", "rollout.rollouts_per_prompt"),
        ("rollout", "max_completion_length", "rollout.max_response_tokens"),
        ("loss", "beta", "loss.kl_weight"),
        ("algorithm_settings", "kl_coef", None),
        ("loss", "kl_coef", "loss.kl_weight"),
        ("loss", "epsilon", "loss.clip_low"),
        ("loss", "epsilon_high", "loss.clip_high"),
        ("optim", "lr", "optim.learning_rate"),
        ("", "use_vllm", "rollout.engine"),
    ],
)
def test_names_of_other_trainers_are_translated(section, key, ours):
    values = {section: {key: 1}} if section else {key: 1}
    where = f"in section [{section}]" if section else "at the top level"
    if ours is None:
        message = f"{section}: unknown key at the top level"
    else:
        message = f"{key}: unknown key {where}; here it is called {ours}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(values)


def test_every_translation_points_to_a_key_that_exists():
    nearest = {key for key, _ in OTHER_UNITS.values()}
    assert set(FOREIGN_KEYS.values()) | nearest <= set(valid_keys())


def test_a_key_in_other_units_is_not_called_a_translation():
    with pytest.raises(ConfigError, match=r"updates_per_step \(mini-batches per step, not their"):
        make_config({"optim": {"ppo_mini_batch_size": 256}})


def test_stating_a_presets_own_objective_changes_nothing():
    for name in ("treepo", "xrpo", "dapo"):
        plain = make_config({"algorithm": name})
        stated = make_config({"algorithm": name, "loss": {"objective": plain.loss.objective}})
        assert stated == plain


def test_no_translation_shadows_a_key_of_ours_elsewhere():
    ours = {key.rpartition(".")[2]: key for key in valid_keys()}
    for foreign, target in FOREIGN_KEYS.items():
        if foreign in ours:
            assert ours[foreign] == target, "a key of ours in a wrong section goes to its own place"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "rollout.temperature",
            0,
            "rollout.temperature: expected greater than or equal to 0.01, got 0",
        ),
        ("rollout.prompts_per_step", 0, "rollout.prompts_per_step: expected greater than or equal"),
        ("planner.confidence", 1, "planner.confidence: expected less than 1, got 1"),
        ("optim.learning_rate", "fast", "optim.learning_rate: expected a valid number"),
        ("loss.objective", "ppo", "loss.objective: expected 'grpo', 'dr_grpo', 'gspo'"),
        ("loss.dual_clip", 1.0, "loss.dual_clip: expected 0 (off) or more than 1"),
        ("loss.dual_clip", 0.5, "loss.dual_clip: expected 0 (off) or more than 1"),
        ("loss.dual_clip", -1, "loss.dual_clip: expected greater than or equal to 0, got -1"),
        ("run.seed", -1, "run.seed: expected greater than or equal to 0, got -1"),
        ("reward.max_error_frac", 2, "reward.max_error_frac: expected less than or equal to 1"),
        ("run.steps", 2.5, "run.steps: expected a valid integer"),
        ("eval", 3, "eval: expected a valid dictionary"),
        (
            "log.trackers",
            ["mlflow"],
            "log.trackers.0: expected 'tensorboard' or 'wandb', got 'mlflow'",
        ),
        ("optim.learning_rate", float("inf"), "optim.learning_rate: expected a finite number"),
        ("rollout.temperature", float("nan"), "rollout.temperature: expected a finite number"),
        ("reward.functions", [], "reward.functions: expected at least 1 item"),
        ("eval.k", [0], "eval.k.0: expected greater than 0, got 0"),
        ("eval.k", [1, "many"], "eval.k.1: expected a valid integer"),
    ],
)
def test_values_out_of_range_name_key_bound_and_value(key, value, message):
    section, _, name = key.partition(".")
    values = {section: {name: value}} if name else {section: value}
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"planner": {"base_rollouts": 9}}, "planner.base_rollouts: expected at most"),
        ({"planner": {"base_rollouts": 1}}, "planner.base_rollouts: expected at least 2"),
        ({"rollout": {"rollouts_per_prompt": 1}}, "planner.base_rollouts: expected at most"),
        ({"reward": {"weights": [1, 2]}}, "reward.weights: expected one per function = 1, got 2"),
        ({"planner": {"base_rollouts": 8}}, "icl.enabled: expected a budget above the base"),
        ({"planner": {"allocation": "uniform"}}, "icl.enabled: expected a planner.allocation"),
        (
            {"icl": {"enabled": False, "prompt_states": True}},
            "icl.prompt_states: expected false with icl.enabled = false",
        ),
        (
            {"algorithm": "dapo", "rollout": {"rollouts_per_prompt": 7.5}},
            "rollout.rollouts_per_prompt: expected a whole number",
        ),
    ],
)
def test_contradictions_between_sections(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(values)


@pytest.mark.parametrize("name", ["a/b", "", "two words", "new\n"])
def test_names_of_held_out_sets_can_name_files(name):
    message = "data.eval: expected names of letters, digits, '_', '.' and '-' (they name files), "
    with pytest.raises(ConfigError, match=re.escape(f"{message}got {name!r}")):
        make_config({"data": {"eval": {"math-500.v1_x": "a.jsonl", name: "b.jsonl"}}})


def test_all_errors_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        make_config({"loss": {"clip_lo": 0.1}, "rollout": {"temperature": 0}})
    assert len(str(error.value).splitlines()) == 2


def test_unknown_algorithm():
    with pytest.raises(ConfigError, match=r"algorithm: expected one of xrpo, grpo.*, got 'ppo'"):
        make_config({"algorithm": "ppo"})


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config: expected an existing file, got .*none\.toml"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "content",
    [b"steps = = 3", b"\xff\xfe\x00", b"[run]\n[run]\n"],
    ids=["syntax", "bytes", "twice"],
)
def test_files_that_are_not_toml(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config: expected a TOML file, got .*broken\.toml"):
        load_config(path)


def test_folder_instead_of_a_file(tmp_path):
    with pytest.raises(ConfigError, match="config: expected a TOML file"):
        load_config(tmp_path)


def test_override_below_a_value(write):
    path = write('algorithm = "grpo"\n')
    with pytest.raises(
        ConfigError, match=r"algorithm\.name: expected a section before the last dot"
    ):
        load_config(path, [("algorithm.name", "x")])


def test_values_are_not_changed_after_loading():
    config = make_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.loss.clip_low = 0.5


def test_derived_counts():
    config = make_config({"rollout": {"prompts_per_step": 3, "rollouts_per_prompt": 8.5}})
    assert config.total_rollouts == 26
    assert config.base_rollouts == 4
    small = make_config({"rollout": {"rollouts_per_prompt": 3}})
    assert small.base_rollouts == 2
    assert make_config({"planner": {"base_rollouts": 5}}).base_rollouts == 5


def test_every_key_is_documented_and_sections_stay_small():
    for section, field in Config.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, Section):
            assert len(model.model_fields) <= 12, section
            for key, inner in model.model_fields.items():
                assert inner.description, f"{section}.{key} has no line on its effect"


def test_another_objective_brings_its_own_clip_and_scale(write):
    config = load_config(write(""), [("loss.objective", "dr_grpo")])
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.scale) == (0.2, 0.2, "none")
    kept = load_config(write("[loss]\nobjective = 'grpo'\nclip_low = 0.1\n"))
    assert (kept.loss.clip_low, kept.loss.clip_high) == (0.1, 0.2)


@pytest.mark.parametrize("algorithm", ["dr_grpo", "dapo", "gspo", "xrpo"])
@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "gspo", "gspo_token", "dapo"])
def test_nothing_of_the_presets_objective_stays_with_another(algorithm, objective):
    config = make_config({"algorithm": algorithm, "loss": {"objective": objective}})
    assert config.loss == make_config({"algorithm": objective}).loss


def test_what_an_algorithm_adds_to_its_objective_stays_with_another():
    config = make_config({"algorithm": "treepo", "loss": {"objective": "grpo"}})
    assert (config.loss.scale, config.loss.group_weight) == ("batch", "effective")
    assert config.loss.clip_high == 0.2


@pytest.mark.parametrize("name", ["7", "2024-01-01", "5 # hi", "true"])
def test_text_on_the_command_line_stays_text(write, name):
    assert load_config(write(""), [("run.name", name)]).run.name == name


def test_several_rewards_need_their_full_reward():
    with pytest.raises(ConfigError, match=r"reward.full_reward: expected to be set"):
        make_config({"reward": {"functions": ["math", "exact"]}})
