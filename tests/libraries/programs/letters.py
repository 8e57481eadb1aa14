"""Texts that show handwritten digits: a letter per pixel, and a tokenizer for them."""

from __future__ import annotations

import digits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

SHADES = "abcdefghijklmnopq"  # from 0 to 16
LABELS = "0123456789"
VOCABULARY = ["[PAD]", "[EOS]", "[UNK]", *SHADES, *LABELS]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(VOCABULARY)}
    found = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    found.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )


def texts() -> tuple[list[str], list[str]]:
    """Return the middle rows of each image as a text, and its label."""
    images, labels = digits.dataset().tensors
    rows = (images[:, 16:48] * 16).long().tolist()
    return [" ".join(SHADES[shade] for shade in row) for row in rows], [
        LABELS[label] for label in labels
    ]
