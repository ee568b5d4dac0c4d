"""A config -> verifier, template, prompts and held-out sets: what a run works on."""

import logging
from typing import Any

from xrpo_fast.config import Config, ConfigError
from xrpo_fast.data import PromptSet, load_prompts
from xrpo_fast.rewards import Verifier, answer_checker, make_verifier
from xrpo_fast.sources import set_identity, set_name
from xrpo_fast.tasks import symbols
from xrpo_fast.templates import PromptTemplate
from xrpo_fast.types import Prompt

logger = logging.getLogger(__name__)

BUILTIN_DATA = "builtin:symbols"


def start_verifier(config: Config) -> Verifier:
    reward = config.reward
    try:
        return make_verifier(
            reward.functions,
            weights=reward.weights or None,
            full_reward=reward.full_reward,
            workers=reward.workers,
            timeout_s=reward.timeout_s,
            max_error_frac=reward.max_error_frac,
            options=reward.options,
        )
    except ValueError as error:
        raise ConfigError(f"reward.{error}") from error


def make_template(config: Config, tokenizer: Any, verifier: Verifier) -> PromptTemplate:
    """The template of a run; the verifier is told whether its prompts end inside a thought."""
    data = config.data
    has_chat = bool(getattr(tokenizer, "chat_template", None))
    raw = data.template == "raw" or (data.template == "auto" and not has_chat)
    is_builtin = data.train.startswith(BUILTIN_DATA)
    template = PromptTemplate(
        tokenizer,
        instruction=data.instruction or None,
        system_prompt=data.system_prompt or None,
        chat_options=data.chat_options,
        raw=raw,
        seeded_builder=symbols.seeded_prompt if is_builtin else None,
    )
    verifier.is_think_prefilled = template.prefills_think
    return template


def load_training_prompts(config: Config, template: PromptTemplate) -> PromptSet:
    return load_prompts(
        config.data.train,
        template=template,
        max_prompt_tokens=config.data.max_prompt_tokens,
        columns=config.data.columns,
        split=config.data.split,
        limit=config.data.limit or None,
        seed=config.run.seed,
        check_answer=answer_checker(config.reward.functions, config.reward.options),
        key="data.train",
    )


def eval_sources(config: Config) -> dict[str, str]:
    """Sources of the held-out sets by name; the built-in task brings its own."""
    sources = dict(config.data.eval)
    if not sources and config.data.train.startswith(BUILTIN_DATA):
        sources = {"heldout": config.data.train}
    return sources


def eval_names(config: Config) -> dict[str, str]:
    """What each held-out set is called in the ids of its prompts: like its file, with its key in
    front where another set of the run is called so too."""
    data = config.data
    taken = {set_name(data.train, data.split): set_identity(data.train, data.split)}
    names = {}
    for key, source in eval_sources(config).items():
        name, identity = set_name(source, data.eval_split), set_identity(source, data.eval_split)
        is_other = taken.setdefault(name, identity) != identity
        names[key] = f"{key}/{name}" if is_other else name
    return names


def load_eval_sets(config: Config, template: PromptTemplate) -> dict[str, list[Prompt]]:
    """Held-out sets by name."""
    sets = {}
    names = eval_names(config)
    for name, source in eval_sources(config).items():
        loaded = load_prompts(
            source,
            template=template,
            max_prompt_tokens=config.data.max_prompt_tokens,
            columns=config.data.columns,
            split=config.data.eval_split,
            seed=config.run.seed,
            check_answer=answer_checker(config.reward.functions, config.reward.options),
            name=names[name],
            key=f"data.eval.{name}",
        )
        sets[name] = loaded.prompts
    return sets


def report_data(prompts: PromptSet, eval_sets: dict[str, list[Prompt]]) -> None:
    held_out = ", ".join(f"{name} {len(found)}" for name, found in eval_sets.items()) or "none"
    line = f"{len(prompts)} training prompts; held out: {held_out}"
    if prompts.dropped_overlong:
        line += f"; {prompts.dropped_overlong} prompts over data.max_prompt_tokens left out"
    logger.info(line)
