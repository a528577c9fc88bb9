"""Tiny Stable Diffusion and SDXL models, built from their configuration classes, in diffusers' format."""

import json
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parents[3] / "examples" / "tasks" / "shapes"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
BLOCKS: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4}


def tokenizer() -> Any:
    """Return a tokenizer of letters; a sequence has 16 tokens."""
    from transformers import CLIPTokenizer

    names = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={n: i for i, n in enumerate(names)}, merges=[], model_max_length=16)


def stable_diffusion(folder: Path, prediction: str = "epsilon") -> Path:
    """Write a tiny Stable Diffusion model for pictures of 16 x 16 pixels."""
    return _saved(folder, two=False, prediction=prediction)


def sdxl(folder: Path) -> Path:
    return _saved(folder, two=True, prediction="epsilon")


def _saved(folder: Path, *, two: bool, prediction: str) -> Path:
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(1)
    words: dict[str, Any] = {
        "vocab_size": 54, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 16, "projection_dim": 16, "bos_token_id": 52, "eos_token_id": 53,
    }  # fmt: skip
    more: dict[str, Any] = {"cross_attention_dim": 16}
    if two:
        more = {"cross_attention_dim": 32, "addition_embed_type": "text_time", "addition_time_embed_dim": 8}
        more |= {"projection_class_embeddings_input_dim": 6 * 8 + 16, "use_linear_projection": True}
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **BLOCKS, **more,
    )  # fmt: skip
    vae = AutoencoderKL(
        latent_channels=4, sample_size=16, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, **BLOCKS,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=prediction,
        clip_sample=False, set_alpha_to_one=False, steps_offset=1,
    )  # fmt: skip
    parts: dict[str, Any] = {"unet": unet, "vae": vae, "scheduler": scheduler, "tokenizer": tokenizer()}
    parts["text_encoder"] = CLIPTextModel(CLIPTextConfig(**words))
    if two:
        parts |= {"tokenizer_2": tokenizer(), "text_encoder_2": CLIPTextModelWithProjection(CLIPTextConfig(**words))}
    index: dict[str, Any] = {"_class_name": "StableDiffusionXLPipeline" if two else "StableDiffusionPipeline"}
    for name, part in parts.items():
        part.save_pretrained(folder / name)
        library = "diffusers" if name in ("unet", "vae", "scheduler") else "transformers"
        index[name] = [library, type(part).__name__]
    if not two:
        index |= {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
