"""One tokenization of prompt and completion: the ids are those of the whole text, for every kind of tokenizer."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.support import tokenizers
from trainer.batching.examples import IGNORED, encode, example_of, tokenised

KINDS = {
    "byte-level": tokenizers.byte_level(),
    "sentencepiece": tokenizers.sentence_pieces(legacy=False),
    "sentencepiece with a dummy prefix": tokenizers.sentence_pieces(legacy=True),
    "unigram": tokenizers.unigram(),
    "wordpiece": tokenizers.word_pieces(),
}
PAIRS = [
    ("What of bread? ", "The price."),
    ("What of bread?", " The price."),
    ("What of bread?\n", "The price."),
    ("Define harbour:", " where boats lay still"),
    ("ü “quoted” 漢字 ", "🙂 and ü"),
    ("", "The price."),
    ("What of bread?", ""),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "completion"), PAIRS)
def test_ids_are_those_of_the_whole_text(kind: str, prompt: str, completion: str) -> None:
    tokenizer = KINDS[kind]
    example = encode(tokenizer, prompt, completion, 512)
    ids = list(tokenizer(prompt + completion)["input_ids"])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not prompt and tokenizer.bos_token_id is not None and ids[0] != tokenizer.bos_token_id:
        ids.insert(0, tokenizer.bos_token_id)
    assert example.ids == ids


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "wordpiece"])
@pytest.mark.parametrize(("prompt", "completion"), PAIRS)
def test_loss_covers_the_completion_and_the_end(kind: str, prompt: str, completion: str) -> None:
    tokenizer = KINDS[kind]
    example = encode(tokenizer, prompt, completion, 512)
    learned = [label for label in example.labels if label != IGNORED]
    text = tokenizer.decode(learned[:-1])
    assert learned[-1] == tokenizer.eos_token_id
    if kind != "unigram" or prompt.isascii():  # it has no token for other characters
        assert text.strip() in (completion.strip(), f"{prompt[-1:]}{completion}".strip())


def test_an_answer_after_a_newline_begins_without_a_mark() -> None:
    """Llama 2, TinyLlama and Phi-3 put a mark before a text that is tokenised alone, and none within a text."""
    tokenizer = KINDS["sentencepiece with a dummy prefix"]
    ids, has_loss = tokenised(tokenizer, "What?\nThe price", [(6, 15)], special=False)
    first = tokenizer.convert_ids_to_tokens(ids)[has_loss.index(True)]
    assert not first.startswith("▁")


def test_a_tokenizer_without_offsets_gives_the_same() -> None:
    fast = KINDS["byte-level"]

    class Slow:
        is_fast = False

        def __call__(self, text: str, **options: Any) -> Any:
            return fast(text, **options)

    text = "<|im_start|>a\nThe price<|im_end|>\nWhat of bread? today"
    spans = [(text.index("The"), text.index("<|im_end|>")), (text.index(" today"), len(text))]
    assert tokenised(Slow(), text, spans, special=False) == tokenised(fast, text, spans, special=False)


@pytest.mark.parametrize("bos", ["<|endoftext|>", "<|im_end|>"])
@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("What?", " The<|im_end|>"), ("What?", " The"), ("", " The<|im_end|>"), ("a<|im_end|>", "")],
)
def test_an_example_ends_with_one_eos_that_has_loss(bos: str, adds_eos: bool, prompt: str, completion: str) -> None:
    from tokenizers import processors

    tokenizer = tokenizers.byte_level()
    tokenizer.bos_token = bos
    eos = tokenizer.eos_token_id
    if adds_eos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|im_end|>", special_tokens=[("<|im_end|>", eos)]
        )
        completion = completion.removesuffix("<|im_end|>")
    example = encode(tokenizer, prompt, completion, 512)
    assert example.ids[-1] == example.labels[-1] == eos
    assert example.ids[-2] != eos or (adds_eos and prompt.endswith("<|im_end|>"))


def test_an_empty_text_keeps_bos_before_eos() -> None:
    tokenizer = tokenizers.byte_level()
    tokenizer.bos_token = tokenizer.eos_token
    assert encode(tokenizer, "", "", 512).ids == [tokenizer.eos_token_id] * 2


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_spans_of_an_example_give_back_its_mask(has_loss: list[bool]) -> None:
    example = example_of(list(range(1, len(has_loss) + 1)), has_loss)
    assert [label != IGNORED for label in example.labels] == has_loss
    assert example.targets == sum(has_loss) - (1 if has_loss[:1] == [True] else 0)
