"""Worked examples in front of a hopeless question: retrieval, cutting, template."""

from dataclasses import replace

from xrpo_fast.exemplars import ExemplarStore, PromptStates
from xrpo_fast.prompt_sampler import PromptSampler
from xrpo_fast.schedule import SeededPrompt
from xrpo_fast.templates import PromptTemplate, cut_exemplar
from xrpo_fast.types import Exemplar, Prompt


class PromptSeeder:
    """Seeds one prompt of a step; asked again in the same step, it answers the same."""

    def __init__(
        self,
        store: ExemplarStore,
        states: PromptStates | None,
        template: PromptTemplate,
        sampler: PromptSampler,
        *,
        max_exemplar_tokens: int,
        max_prompt_tokens: int,
    ) -> None:
        self.store = store
        self.states = states
        self.template = template
        self.sampler = sampler
        self.max_exemplar_tokens = max_exemplar_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self._step = -1
        self._made: dict[int, SeededPrompt | None] = {}
        self.num_shown = 0
        self.num_cut = 0

    def __call__(self, prompt: Prompt, step: int) -> SeededPrompt | None:
        if step != self._step:
            self._step, self._made = step, {}
        if prompt.index not in self._made:
            self._made[prompt.index] = self._seed(prompt, step)
        return self._made[prompt.index]

    def _seed(self, prompt: Prompt, step: int) -> SeededPrompt | None:
        epoch = self.sampler.epoch
        if self.states is not None and not self.states.should_seed(prompt.index, epoch):
            return None
        fitted = [self._fit(exemplar) for exemplar in self.store.retrieve(prompt.index, step)]
        exemplars = tuple(exemplar for exemplar in fitted if exemplar is not None)
        while exemplars:
            prompt_ids = self.template.render_seeded(prompt, exemplars)
            if len(prompt_ids) <= self.max_prompt_tokens:
                return prompt_ids, exemplars
            exemplars = exemplars[:-1]
        return None

    def _fit(self, exemplar: Exemplar) -> Exemplar | None:
        """The exemplar within max_exemplar_tokens, cut where it must be; None: skip it."""
        if exemplar.num_tokens > self.max_exemplar_tokens:
            tokenizer = self.template.tokenizer
            ids = tokenizer(exemplar.response, add_special_tokens=False)["input_ids"]
            cut = cut_exemplar(ids, self.max_exemplar_tokens)
            if cut is None:
                return None
            exemplar = replace(exemplar, response=tokenizer.decode(cut[0]), num_tokens=len(cut[0]))
            self.num_cut += cut[1]
        self.num_shown += 1
        return exemplar

    def metrics(self) -> dict[str, float]:
        """icl/cut_frac over the run."""
        return {"icl/cut_frac": self.num_cut / self.num_shown if self.num_shown else 0.0}
