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
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

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


def build_policy(seed: int) -> "LlamaForCausalLM":
    """The untrained policy, fp32; only its initial weights depend on the seed.

    After one warm-up each, very hard questions behind one worked example: this form .96, two heads
    of 32 .94 (chains .78 for .87), tied embedding .91 (one world; .97 untied).
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        # vLLM's CPU attention takes 32 or 64.
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        # Documents are about 70 tokens: with the usual 10000 most frequencies would stand still.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.vocab["$"],
        pad_token_id=tokenizer.vocab["<pad>"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
