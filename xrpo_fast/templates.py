"""From text or chat messages to the token ids that the engine gets, once and exactly.

A chat template is rendered once, with its generation prompt, and tokenised without adding special
tokens, so that there is never a second BOS. Worked examples go into the same user turn as the
question: several chat templates strip the reasoning from earlier assistant turns.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xrpo_fast.config import ConfigError
from xrpo_fast.types import Exemplar, Prompt

HEAD_FRAC = 0.6
"""Share of a cut exemplar that is its beginning; the rest is its end."""
MIN_CUT_TOKENS = 256
"""An exemplar is not cut below this: what is left would explain nothing."""
THINK_TAG = "<think>"

SeededBuilder = Callable[[str, Iterable[tuple[str, str]]], str]
"""(question, [(question, response) of each exemplar]) -> text of the seeded prompt."""


class TemplateError(ConfigError):
    """A prompt cannot be rendered with this tokenizer. Exit code 2."""


class PromptTemplate:
    """Renders prompts and seeded prompts for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
        instruction: appended to the question after a blank line.
        system_prompt: system turn; chat only.
        raw: no chat template, the text as it is (base models, the built-in task).
        seeded_builder: text of a seeded prompt, raw only; default: a few-shot document.
        chat_options: keyword arguments for the chat template, e.g. {"enable_thinking": False}.
    Raises:
        TemplateError: the tokenizer has no chat template, or an option does not apply.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        instruction: str | None = None,
        system_prompt: str | None = None,
        raw: bool = False,
        seeded_builder: SeededBuilder | None = None,
        chat_options: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.instruction = instruction or ""
        self.system_prompt = system_prompt or ""
        self.raw = raw
        self._seeded_builder = seeded_builder
        self._chat_options = chat_options or {}
        if not raw and not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                "data.template: expected a tokenizer with a chat template, got one without; set "
                'data.template = "raw" for a base model, or use an instruct model'
            )
        if raw and self.system_prompt:
            raise TemplateError(
                "data.system_prompt: expected none with a raw template, got one; put it into "
                "data.instruction or use a chat template"
            )
        if raw and self._chat_options:
            raise TemplateError(
                f"data.chat_options: expected none with a raw template, got {self._chat_options}; "
                'set data.template = "chat" or remove them'
            )
        if seeded_builder is not None and not raw:
            raise TemplateError("seeded_builder: expected a raw template, got a chat template")
        # What the tokenizer puts in front of a text by itself: a BOS, or nothing.
        added = tokenizer("", add_special_tokens=True)["input_ids"]
        bos = tokenizer.bos_token_id
        self._raw_prefix = (bos,) if bos is not None and bos in added else ()

    @property
    def prefills_think(self) -> bool:
        """Whether a rendered prompt ends inside a thought: a response without `</think>` is then
        all thought."""
        return not self.raw and self._chat_text([_user("1 + 1?")]).rstrip().endswith(THINK_TAG)

    def render(self, messages_or_text: str | Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """Token ids of a prompt, ready for the model's answer.

        Args:
            messages_or_text: the question, or chat messages of which the last is the user's.
        """
        if isinstance(messages_or_text, str):
            return self._render_text(self._instruct(messages_or_text))
        messages = _checked_messages(messages_or_text)
        if self.raw:
            raise TemplateError(
                "prompt: expected text with a raw template, got chat messages; set "
                'data.template = "chat"'
            )
        last = {**messages[-1], "content": self._instruct(messages[-1]["content"])}
        return self._render_chat([*messages[:-1], last])

    def render_seeded(self, prompt: Prompt, exemplars: Sequence[Exemplar]) -> tuple[int, ...]:
        """Token ids of a prompt behind worked examples: examples, question and instruction in one
        user turn; the few-shot document with a raw template."""
        shown = [(exemplar.question, exemplar.response) for exemplar in exemplars]
        source = prompt.question if prompt.messages is None else prompt.messages
        if self.raw:
            if self._seeded_builder is not None:
                return self._render_text(self._seeded_builder(prompt.question, shown))
            parts = [f"{self._instruct(asked)}\n{response}" for asked, response in shown]
            return self._render_text("\n\n".join([*parts, self._instruct(prompt.question)]))
        messages = [_user(source)] if isinstance(source, str) else _checked_messages(source)
        content = self._instruct(_worked_examples(shown) + messages[-1]["content"])
        return self._render_chat([*messages[:-1], _user(content)])

    def _instruct(self, question: str) -> str:
        return f"{question}\n\n{self.instruction}" if self.instruction else question

    def _render_text(self, text: str) -> tuple[int, ...]:
        if not self.raw:
            return self._render_chat([_user(text)])
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if ids[:1] == self._raw_prefix else self._raw_prefix + ids

    def _render_chat(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        text = self._chat_text(messages)
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _chat_text(self, messages: list[dict[str, Any]]) -> str:
        if self.system_prompt:
            if messages[0]["role"] == "system":
                raise TemplateError(
                    "data.system_prompt: expected data without system messages, got one; remove "
                    "data.system_prompt"
                )
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._chat_options
        )


def cut_exemplar(token_ids: Sequence[int], limit: int) -> tuple[tuple[int, ...], bool] | None:
    """An exemplar in at most `limit` tokens, and whether it was cut: head 60 %, tail 40 %.

    None where it would have to be cut below 256 tokens; one that fits is never cut.
    """
    if len(token_ids) <= limit:
        return tuple(token_ids), False
    if limit < MIN_CUT_TOKENS:
        return None
    num_head = int(limit * HEAD_FRAC)
    tail_start = len(token_ids) - (limit - num_head)
    return (*token_ids[:num_head], *token_ids[tail_start:]), True


def question_of(messages_or_text: str | Sequence[dict[str, Any]]) -> str:
    """What the user asks: the text, or the content of the last message."""
    if isinstance(messages_or_text, str):
        return messages_or_text
    if not isinstance(messages_or_text, Sequence):
        raise TemplateError(
            f"prompt: expected text or a list of messages, got {messages_or_text!r}; put numbers "
            "in quotes"
        )
    return _checked_messages(messages_or_text)[-1]["content"]


def _worked_examples(shown: list[tuple[str, str]]) -> str:
    if not shown:
        return ""
    examples = "".join(
        f"### Example {number}\n\nProblem:\n{question}\n\nSolution:\n{response}\n\n"
        for number, (question, response) in enumerate(shown, start=1)
    )
    return (
        "Here are similar problems with correct solutions.\n\n"
        f"{examples}### Your problem\n\nSolve this one in the same way.\n\n"
    )


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _checked_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    checked = list(messages)
    for message in checked:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            raise TemplateError(
                "prompt: expected messages with a role and a text content, got "
                f"{str(message)[:200]!r}"
            )
    if not checked or checked[-1]["role"] != "user":
        last = checked[-1]["role"] if checked else "no message"
        raise TemplateError(f"prompt: expected the last message from 'user', got {last!r}")
    return checked
