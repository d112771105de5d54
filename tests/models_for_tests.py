"""Tiny models and tokenizers, random but fixed, for situations that SmolLM2 is not in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = "the cat sat on a mat , and the dog ran off . what is it ? one two three four five six seven eight . hello world"
CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level(**settings: Any) -> Any:
    """A byte-level tokenizer like GPT-2's, without a pad token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<turn>"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    core.train_from_iterator([WORDS] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **SPECIALS, **settings)


def sentence_piece(**settings: Any) -> Any:
    """A tokenizer like Llama 2's: spaces as marks, bytes for what is rare, BOS added by itself."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    core.train_from_iterator([WORDS] * 3, trainer)
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    state = json.loads(core.to_str())  # the trainer took bytes for special tokens; they are ordinary ones
    state["added_tokens"] = state["added_tokens"][:3]
    core = Tokenizer.from_str(json.dumps(state))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **SPECIALS, **settings)


CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4),
    "mistral": lambda: transformers.MistralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    ),
}


PAIRS: dict[str, Any] = {
    "t5": lambda: transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "bart": lambda: transformers.BartConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        init_std=0.3,
    ),
}


def tiny_pair(kind: str) -> Any:
    """A random encoder-decoder model in float64."""
    config = PAIRS[kind]()
    settings = {"vocab_size": 324, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    for name, value in settings.items():
        setattr(config, name, value)
    model = lively(transformers.AutoModelForSeq2SeqLM, config)
    model.generation_config.forced_bos_token_id = 0 if kind == "bart" else None
    return model


def lively(maker: Any, config: Any) -> Any:
    """A random model that is livelier than the flat distributions of a fresh one."""
    torch.manual_seed(0)
    model = maker.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model.eval()


def tiny(kind: str = "llama", context: int = 256, **changes: Any) -> Any:
    """A random model in float64, where rounding makes no ties."""
    config = CONFIGS[kind]()
    settings = {"vocab_size": 324, "max_position_embeddings": context, "bos_token_id": 0, "eos_token_id": 1, **changes}
    for name, value in settings.items():
        setattr(config, name, value)
    return lively(transformers.AutoModelForCausalLM, config)


def saved(folder: Path, model: Any, tokenizer: Any) -> Path:
    """A model folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def many_prompts() -> list[str]:
    """Sixty-four prompts of very different lengths."""
    things = ["apple", "tiger", "river", "lamp", "bicycle", "shark", "candle", "rocket"]
    forms = [
        "Hi {}",
        "Name one color of a {}.",
        "Is a {} a kind of food? Answer yes or no.",
        "Write about a {}.",
        "The box was torn and the {} in it was broken. " * 6 + "Is this review positive or negative?",
        "Count: one {},",
        "What is a {}?",
        "It lasts six hours, says the {}. " * 3 + "Say it again.",
    ]
    return [form.replace("{}", thing) for form in forms for thing in things]
