"""The tiny policy of the built-in task: a standard Hugging Face Llama with its own tokenizer.

One token per code, rule letter, digit and mark: 96 in all. '$' is the end-of-sequence token, also
between the worked examples of a seeded prompt; responses to verify are decoded with
skip_special_tokens=False. There is no chat template and no begin-of-sequence token: a prompt is the
bare question.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from xrpo_fast.tasks.symbols import CODES, RULES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

POLICY_DIR = Path(__file__).parent / "policy"
"""The shipped, warmed-up policy."""
MAX_POSITIONS = 256


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """The tokenizer; ids are positions in pad, unk, '$?:=', digits, rules, codes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<unk>", *"$?:=", *"0123456789", *RULES, *CODES]
    backend = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z]{2}|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="$",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
    )
