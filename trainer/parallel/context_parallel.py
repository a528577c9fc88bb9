"""Context parallelism: the tokens of a sequence divided between processes.

Each process computes a shard of every sequence and gathers the keys and values of the others for its attention.
Llama 3 was trained this way (arXiv 2407.21783, section 3.3.2). PyTorch's own `context_parallel` has no kernel for a
CPU, and supports neither packed rows nor windows.
"""

from typing import Any

import torch
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.batching.examples import IGNORED
from trainer.core.errors import UserFault
from trainer.tasks.common.task_data import Batch

NAME = "gathered"
TOKENS = ("input_ids", "position_ids", "wanted")
"""Tensors of a causal language model's batch with a value for each token."""


class ContextParallel:
    """Context parallelism for training batches. In evaluations each process computes whole sequences."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._of, self._number = mesh, mesh.size(), mesh.get_local_rank()
        self._seen = self._back = torch.empty(0)
        """Matrices of this process's tokens x all tokens: the attention mask, and the distance back in tokens."""

    def attach(self, bare: Any) -> None:
        """Make the model's attention gather keys and values. Raise UserFault unless the attention is sdpa."""
        if bare.config._attn_implementation != "sdpa":
            raise UserFault("world.parallelism.context: only with train.attention auto or sdpa; set context to 1")
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        bare.set_attn_implementation(NAME)

    def shard_sequence(self, batch: Batch) -> Batch:
        """Return this process's tokens of a batch, padded so that all processes have equally many."""
        rows, length = batch["input_ids"].shape
        missing = -length % self._of
        places = torch.arange(length + missing, device=batch["input_ids"].device).expand(rows, -1)
        shared = {"position_ids": places[:, :length], **{n: t for n, t in batch.items() if n in TOKENS}}
        shared = {
            n: functional.pad(t, (0, length + missing - t.shape[1]), value=IGNORED if n == "wanted" else 0)
            for n, t in shared.items()
        }
        # Each row of a pack begins at position 0; padding is a row of its own.
        row_of = (shared["position_ids"] == 0).cumsum(-1)
        begin = self._number * places.shape[1] // self._of
        end = begin + places.shape[1] // self._of
        self._back = places[0, begin:end, None] - places[0, None, :]
        self._seen = (self._back >= 0) & (row_of[:, begin:end, None] == row_of[:, None, :])
        return {name: tensor[:, begin:end] for name, tensor in shared.items()}

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> Any:
        if module.training:
            attention_mask = self._seen[:, None]
            if window := options.get("sliding_window"):
                attention_mask = attention_mask & (self._back < window)
            key, value = (self._gathered(t) for t in (key, value))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of all tokens; its gradient is summed over the processes."""
        gathered: torch.Tensor = all_gather_tensor_autograd(tensor.contiguous(), 2, self._mesh.get_group())
        return gathered
