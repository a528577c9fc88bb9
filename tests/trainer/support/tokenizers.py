"""Small trained tokenizers of the kinds that models have."""

from typing import Any

TEXTS = [
    *("The harbour was quiet and the boats lay still in the morning light.",) * 3,
    *("What is the price of two loaves of bread today? A tailor measured the cloth twice.",) * 3,
    *("user system assistant tool think answer question: define word",) * 3,
    *map(chr, range(32, 127)),
]  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
SIZE = 600


def byte_level() -> Any:
    """Return a byte-level BPE, as GPT-2, Llama 3 and Qwen have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=SIZE, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<pad>"
    )


def sentence_pieces(*, legacy: bool) -> Any:
    """Return a BPE over `▁` in place of spaces. `legacy`: with a mark before each text, as Llama 2 and Phi-3 have."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=SIZE, special_tokens=["<unk>", "<s>", "</s>", *bytes_])
    )
    if legacy:
        tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_start(tokenizer)


def unigram() -> Any:
    """Return a unigram model with a mark before the text, as T5 and XLNet have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=SIZE, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _with_start(tokenizer)


def word_pieces() -> Any:
    """Return a WordPiece model in lower case, as BERT has; it puts [CLS] and [SEP] around a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=names))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def _with_start(made: Any) -> Any:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    start = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", start)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
