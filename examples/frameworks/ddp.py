"""Plain torch on several GPUs: the same rows in the same order after a resume, on any number of processes.

    torchrun --nproc-per-node=gpu ddp.py STEPS

On several machines torchrun also takes --nnodes, --node-rank=$GPUBROKER_NODE and the address in $GPUBROKER_MASTER.
"""

import sys

import torch
from bytes_model import NextByte, loss, windows
from kept import ASIDE, KEPT, Stop, publish
from torch import distributed, nn

LAST = KEPT / "last.pt"
EVERY, BATCH, SEED = 20, 16, 7


def rows_of(step: int, count: int) -> torch.Tensor:
    """Return the rows of a step. They depend on the step's number only, so the order need not be saved."""
    batches = count // BATCH
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED + step // batches))
    return order[step % batches * BATCH :][:BATCH]


def agreed(stop: Stop, device: torch.device) -> bool:
    """Return True if any process was asked to stop: all of them stop after the same step."""
    flag = torch.tensor(float(bool(stop)), device=device)
    distributed.all_reduce(flag, distributed.ReduceOp.MAX)
    return bool(flag.item())


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, ASIDE / LAST.name)
    publish(ASIDE / LAST.name, LAST.name)


def main(steps: int) -> None:
    stop = Stop()
    distributed.init_process_group()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    torch.manual_seed(SEED)
    bare, data, first = NextByte().to(device), windows(), 0
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    if LAST.exists():
        saved = torch.load(LAST, map_location=device, weights_only=True)
        first = saved["step"]
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model = nn.parallel.DistributedDataParallel(bare)
    if rank == 0:
        print(f"starting from step {first} on {world} processes", flush=True)
    for step in range(first, steps):
        batch = data[rows_of(step, len(data))[rank::world]].to(device)
        batch_loss = loss(model, batch)
        optimizer.zero_grad()
        batch_loss.backward()
        optimizer.step()
        last = agreed(stop, device) or step + 1 == steps
        if rank == 0 and (last or (step + 1) % EVERY == 0):
            save(step + 1, bare, optimizer)
            print(f"saved step {step + 1}, loss {batch_loss.item():.3f}", flush=True)
        if last:
            break
    distributed.destroy_process_group()


if __name__ == "__main__":
    ASIDE.mkdir(exist_ok=True)
    main(int(sys.argv[1]))
