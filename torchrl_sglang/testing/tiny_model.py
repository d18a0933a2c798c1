"""A tiny Qwen2 model and tokenizer, without a download.

Both ``transformers`` and an SGLang server load it. The tokenizer has a token per
character, so text, tokens and log-probs can be compared position by position; the
random weights are large enough for the output to depend on every prompt token.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

__all__ = ["CHAT_TEMPLATE", "make_tiny_model", "make_tiny_tokenizer", "save_tiny_model"]

PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Printable ASCII and the newline, as byte-level tokenizers write them.
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation + "ĠĊ"

# Qwen's ChatML. The generation block, which becomes the assistant mask, holds content
# and end of turn: the model has to learn both.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:\\n' }}"
    "{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    r"""Returns a tokenizer with a token per character.

    It is Qwen's byte-level tokenizer without merges, restricted to printable ASCII and
    the newline, which encode and decode unchanged; other characters are dropped. The 99
    tokens include ChatML's (``<|im_end|>`` ends a turn, ``<|endoftext|>`` pads), and
    the chat template yields assistant masks.

    Example:
        >>> tokenizer = make_tiny_tokenizer()
        >>> tokenizer.tokenize("a b<|im_end|>")
        ['a', 'Ġ', 'b', '<|im_end|>']
        >>> chat = [{"role": "user", "content": "1+1="}]
        >>> tokenizer.apply_chat_template(
        ...     chat, tokenize=False, add_generation_prompt=True
        ... )
        '<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n'
    """
    tokens = [PAD_TOKEN, START_TOKEN, END_TOKEN, *_CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Saved beside a Qwen2 model, this is read back as transformers' Qwen2 tokenizer:
    # only a byte-level BPE model behaves the same before and after.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=[START_TOKEN],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int | None = None,
    max_position_embeddings: int = 2048,
    initializer_range: float = 0.3,
    tie_word_embeddings: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Qwen2ForCausalLM:
    """Returns a small Qwen2 model with random weights, in evaluation mode, on CPU.

    The same arguments give the same weights; the global random state is unchanged.

    Args:
        tokenizer: The tokenizer whose vocabulary and special tokens the model uses.
        hidden_size: Width of the residual stream.
        num_layers: Number of transformer blocks.
        num_heads: Number of query heads, each of at least 16 dimensions.
        num_kv_heads: Number of key and value heads (grouped-query attention).
        intermediate_size: Width of the MLP. Defaults to ``4 * hidden_size``.
        max_position_embeddings: Longest sequence.
        initializer_range: Standard deviation of weights and biases. The default makes
            greedy decoding of the untrained model vary; use about 0.05 for training.
        tie_word_embeddings: Whether the output layer is the input embedding.
        seed: Seed of the weights.
        dtype: Data type of the weights.

    Raises:
        ValueError: If the heads do not divide the width, or have fewer than 16
            dimensions, which attention kernels need.

    Example:
        >>> tokenizer = make_tiny_tokenizer()
        >>> model = make_tiny_model(tokenizer)
        >>> prompt = tokenizer("Hello", return_tensors="pt")
        >>> output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        >>> output.shape
        torch.Size([1, 13])
    """
    head_dim = hidden_size // num_heads
    if hidden_size % num_heads or num_heads % num_kv_heads or head_dim < 16:
        raise ValueError(
            f"hidden_size={hidden_size} must be a multiple of num_heads={num_heads} "
            f"with at least 16 dimensions per head, and num_heads a multiple of "
            f"num_kv_heads={num_kv_heads}."
        )
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=tie_word_embeddings,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        # A zero bias would hide a missing transfer to the engine.
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=initializer_range)
    return model.to(dtype).eval()


def save_tiny_model(path: str | Path, **kwargs: Any) -> Path:
    """Writes a tiny model and its tokenizer as Hugging Face files.

    Args:
        path: The folder to write to; created if missing.
        **kwargs: Keyword arguments of :func:`make_tiny_model`.

    Returns:
        The folder, which ``AutoModelForCausalLM``, ``AutoTokenizer`` and an SGLang
        server's ``--model-path`` accept.

    Example:
        >>> import tempfile
        >>> path = save_tiny_model(tempfile.mkdtemp(), num_layers=1)
        >>> (path / "config.json").exists()
        True
    """
    path = Path(path)
    tokenizer = make_tiny_tokenizer()
    make_tiny_model(tokenizer, **kwargs).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
