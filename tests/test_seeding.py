"""PromptSeeder: which exemplars fit in front of a question, and what is counted of them."""

from types import SimpleNamespace

import pytest

from xrpo_fast.seeding import PromptSeeder
from xrpo_fast.types import Exemplar, Prompt

QUESTION = Prompt(id="q", index=0, question="q", token_ids=(1,), answer="")


class Words:
    """One token per word."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, token_ids) -> str:
        return " ".join(map(str, token_ids))


def make_seeder(lengths: list[int], *, max_exemplar_tokens: int, max_prompt_tokens: int):
    exemplars = tuple(
        Exemplar(
            prompt_id=f"e{i}",
            question="",
            response=" ".join(map(str, range(length))),
            num_tokens=length,
            step=0,
            similarity=0.9,
        )
        for i, length in enumerate(lengths)
    )
    tokenizer = Words()

    def render(prompt: Prompt, shown) -> tuple[int, ...]:
        return sum((tuple(map(int, e.response.split())) for e in shown), prompt.token_ids)

    return PromptSeeder(
        SimpleNamespace(retrieve=lambda index, step: exemplars),  # pyright: ignore[reportArgumentType]
        None,
        SimpleNamespace(tokenizer=tokenizer, render_seeded=render),  # pyright: ignore[reportArgumentType]
        SimpleNamespace(epoch_of=lambda index: 0),  # pyright: ignore[reportArgumentType]
        max_exemplar_tokens=max_exemplar_tokens,
        max_prompt_tokens=max_prompt_tokens,
    )


@pytest.mark.parametrize(
    ("lengths", "shown", "cut_frac", "skipped"),
    [
        ([10, 20], ["e0", "e1"], 0.0, 0),
        ([10, 400], ["e0", "e1"], 0.5, 0),  # cut to 300
        ([300, 300], ["e0"], 0.0, 1),  # the second would pass the prompt's limit
        ([600], ["e0"], 1.0, 0),
    ],
)
def test_exemplars_fit_and_are_counted_once(lengths, shown, cut_frac, skipped) -> None:
    seeder = make_seeder(lengths, max_exemplar_tokens=300, max_prompt_tokens=400)
    seeded = seeder(QUESTION, 1)
    assert seeded is not None
    prompt_ids, exemplars = seeded
    assert [e.prompt_id for e in exemplars] == shown
    assert all(e.num_tokens == len(e.response.split()) <= 300 for e in exemplars)
    assert len(prompt_ids) == 1 + sum(e.num_tokens for e in exemplars) <= 400
    assert seeder(QUESTION, 1) is seeded  # asked again in the step: the same, counted once
    assert seeder.read_metrics() == {
        "icl/shown": len(shown),
        "icl/cut_frac": cut_frac,
        "icl/skipped": skipped,
    }
    assert seeder.read_metrics()["icl/shown"] == 0


def test_nothing_fits() -> None:
    # Below 256 tokens an exemplar is not cut.
    seeder = make_seeder([300, 80], max_exemplar_tokens=200, max_prompt_tokens=50)
    assert seeder(QUESTION, 1) is None
    metrics = seeder.read_metrics()
    assert metrics["icl/skipped"] == 2
    assert metrics["icl/shown"] == 0
