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
        self._num_shown = self._num_cut = self._num_skipped = 0

    def __call__(self, prompt: Prompt, step: int) -> SeededPrompt | None:
        if step != self._step:
            self._step, self._made = step, {}
        if prompt.index not in self._made:
            self._made[prompt.index] = self._seed(prompt, step)
        return self._made[prompt.index]

    def _seed(self, prompt: Prompt, step: int) -> SeededPrompt | None:
        epoch = self.sampler.epoch_of(prompt.index)
        if self.states is not None and not self.states.should_seed(prompt.index, epoch):
            return None
        retrieved = self.store.retrieve(prompt.index, step)
        fitted = [fit for exemplar in retrieved if (fit := self._fit(exemplar)) is not None]
        seeded = None
        while fitted and seeded is None:
            exemplars = tuple(exemplar for exemplar, _ in fitted)
            prompt_ids = self.template.render_seeded(prompt, exemplars)
            if len(prompt_ids) <= self.max_prompt_tokens:
                seeded = prompt_ids, exemplars
            else:
                fitted.pop()
        self._num_shown += len(fitted)
        self._num_cut += sum(is_cut for _, is_cut in fitted)
        self._num_skipped += len(retrieved) - len(fitted)
        return seeded

    def _fit(self, exemplar: Exemplar) -> tuple[Exemplar, bool] | None:
        """The exemplar within max_exemplar_tokens, and whether it was cut; None: too long to cut
        sensibly."""
        if exemplar.num_tokens <= self.max_exemplar_tokens:
            return exemplar, False
        tokenizer = self.template.tokenizer
        ids = tokenizer(exemplar.response, add_special_tokens=False)["input_ids"]
        cut = cut_exemplar(ids, self.max_exemplar_tokens)
        if cut is None:
            return None
        kept, is_cut = cut
        return replace(exemplar, response=tokenizer.decode(kept), num_tokens=len(kept)), is_cut

    def read_metrics(self) -> dict[str, float]:
        """Exemplars since the last call: icl/shown, icl/cut_frac of them (head and tail only),
        icl/skipped (retrieved, but too long for the prompt)."""
        shown = self._num_shown
        values = {
            "icl/shown": shown,
            "icl/cut_frac": self._num_cut / shown if shown else float("nan"),
            "icl/skipped": self._num_skipped,
        }
        self._num_shown = self._num_cut = self._num_skipped = 0
        return values
