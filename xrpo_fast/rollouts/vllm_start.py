"""How vLLM is started in this process, and what its model's weights are called."""

import logging
import os
from typing import Any

import torch

from xrpo_fast.rollouts.checks import EngineError

_CPU_BLOCK_TOKENS = 128


def start_llm(options: dict[str, Any], memory_fraction: float) -> Any:
    """LLM in this process. The environment is set before vLLM is imported, as some of it is read
    then, and is given back by the caller."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    is_level_set = "VLLM_LOGGING_LEVEL" in os.environ
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    if not is_level_set:
        # Where vLLM was imported before, it has set its own level. What its warnings say of our
        # use is either harmless or checked here.
        logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        return LLM(
            **options,
            **_device_options(options, memory_fraction),
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
    except Exception as error:
        raise EngineError(
            f"engine: vLLM did not start on {options['model']!r}: {error}; "
            'engine = "transformers" needs no vLLM'
        ) from error


def _device_options(options: dict[str, Any], memory_fraction: float) -> dict[str, Any]:
    """On a GPU a share of its memory, and sleep; on a CPU KV cache for all slots, no compiling."""
    if torch.cuda.is_available():
        return {"gpu_memory_utilization": memory_fraction, "enable_sleep_mode": True}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        options["model"], trust_remote_code=options["trust_remote_code"]
    ).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    item_bytes = getattr(torch, options["dtype"]).itemsize
    block_bytes = _CPU_BLOCK_TOKENS * 2 * config.num_hidden_layers * heads * head_size * item_bytes
    num_blocks = options["max_num_seqs"] * (options["max_model_len"] // _CPU_BLOCK_TOKENS + 1) + 1
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kv_bytes = min(num_blocks * block_bytes, int(memory_fraction * free_bytes))
    return {"kv_cache_memory_bytes": kv_bytes, "enforce_eager": True}


def weight_names(model_path: str, trust_remote_code: bool) -> frozenset[str]:
    """Names of the state dict of the transformers model, tied heads included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return frozenset(model.state_dict())
