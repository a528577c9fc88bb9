"""`global_batch: auto`: a published batch for the task, the method and the number of rows.

Before planning or training the number replaces `auto` in the configuration.
"""

from dataclasses import dataclass

from trainer.contract.train import TrainConfig
from trainer.dataset.example_counts import ExampleCount, count_rows

MIN_SCALED_BATCH = 8
"""Smallest batch for small data, if the recipe's batch is at least as large."""
PROPORTION = "fewer in proportion to the rows (Smith and Le 2018)"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Published recipe: `batch` rows a step, on a dataset of `rows`."""

    batch: int
    rows: int
    source: str


ENCODER = (Recipe(batch=32, rows=2_490, source="Devlin et al. 2019, appendix A.3, of RTE and larger"),)
LOW_RANK = (Recipe(batch=16, rows=9_846, source="Dettmers et al. 2023, QLoRA, table 9, of OASST1"),)
WHOLE = (
    Recipe(batch=32, rows=1_000, source="Zhou et al. 2023, LIMA, section 3"),
    Recipe(batch=128, rows=52_002, source="Taori et al. 2023, Stanford Alpaca"),
)
RECIPES: dict[str, tuple[Recipe, ...]] = {
    "text_classification": ENCODER,
    "text_regression": ENCODER,
    "token_classification": ENCODER,
    "seq2seq": (Recipe(batch=128, rows=87_599, source="Raffel et al. 2020, section 3.1.2, of SQuAD and larger"),),
    "dpo": (Recipe(batch=32, rows=64_000, source="Tunstall et al. 2023, Zephyr, of UltraFeedback"),),
    "orpo": (Recipe(batch=4, rows=43_835, source="TRL, examples/scripts/orpo.py, of HH-RLHF helpful"),),
    "kto": (Recipe(batch=16, rows=13_500, source="TRL, examples/scripts/kto.py, of KTO-mix-14k"),),
    "reward_model": (Recipe(batch=8, rows=62_000, source="TRL, examples/scripts/reward_modeling.py"),),
    "image_classification": (
        Recipe(batch=8, rows=1_034, source="transformers, examples/pytorch/image-classification, of beans"),
    ),
    "text_to_image": (Recipe(batch=4, rows=833, source="diffusers, examples/text_to_image"),),
}
"""Recipes by task, larger datasets later; those of language models are by method."""


def resolve_global_batch(train: TrainConfig, rows: int | ExampleCount, machines: int = 1) -> tuple[TrainConfig, str]:
    """Return the configuration with a number for `auto`, and a message with the number and its reasons.

    A configuration with a number is returned unchanged, with an empty message. `rows`: all rows of the dataset with
    held-out rows, or the examples that they make. The recipe is that of the largest published dataset that is not
    larger. With fewer rows than any recipe, the batch is the power of two in proportion. The batch is a multiple of
    `micro_batch` for each machine, and no more than the rows if possible.
    """
    if train.global_batch != "auto":
        return train, ""
    rows = (count_rows(rows, train.data) if isinstance(rows, int) else rows).training
    recipe, batch = _published(train, rows)
    reasons = [recipe.source]
    if batch < recipe.batch:
        reasons.append(f"{PROPORTION}, {batch} of {rows:,} for {recipe.batch} of {recipe.rows:,}")
    if batch > rows:
        batch = max(1, rows)
        reasons.append(f"no more than the {rows} rows to train on")
    unit = (1 if train.micro_batch == "auto" else train.micro_batch) * machines
    if batch % unit:
        batch = max(1, batch // unit) * unit
        factors = [f"micro_batch {train.micro_batch}"] * (train.micro_batch != "auto")
        factors += [f"{machines} machines"] * (machines > 1)
        reasons.append(f"a multiple of {' for '.join(factors)}")
    return train.model_copy(update={"global_batch": batch}), f"global_batch auto: {batch} ({'; '.join(reasons)})"


def _published(train: TrainConfig, rows: int) -> tuple[Recipe, int]:
    """Return the recipe, and its batch for this number of rows."""
    by_method = LOW_RANK if train.adapters else WHOLE
    recipes = by_method if train.task == "causal_lm" else RECIPES[train.task]
    recipe = next((r for r in reversed(recipes) if r.rows <= rows), recipes[0])
    if rows >= recipe.rows:
        return recipe, recipe.batch
    share = recipe.batch * rows // recipe.rows
    return recipe, max(min(MIN_SCALED_BATCH, recipe.batch), 1 << max(0, share.bit_length() - 1))
