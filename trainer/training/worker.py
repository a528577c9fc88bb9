"""Training process: the agent starts `python -m trainer.training.worker RUN_FOLDER`, and it dies with the agent."""

import errno
import os
import signal
import sys
import traceback
from pathlib import Path

from trainer.contract.documents import ExitCode
from trainer.core.errors import BadHost, Drained, Fault
from trainer.core.ipc import Ended, RunFolder, WorkerJob, replace
from trainer.core.parent_death import die_with_parent
from trainer.training.divergence import Rollback


def main(root: Path) -> ExitCode:
    """Run the job in the folder and write its end there."""
    run = RunFolder(root=root)
    ended = _attempt(WorkerJob.model_validate_json(run.job.read_bytes()), run)
    if ended.message:
        print(f"failed: {ended.message}", flush=True)
    if ended.message or not _rank("LOCAL_RANK"):
        _write_end(run, ended)
    # A launcher treats any other code as a failure and kills the processes that are still saving.
    end_requested = _rank("RANK") is not None and ended.code in (ExitCode.DRAINED, ExitCode.BACK)
    return ExitCode.COMPLETED if end_requested else ExitCode(ended.code)


def _write_end(run: RunFolder, ended: Ended) -> None:
    """Write the end. The first failure of this machine counts, unless it only followed from another failure."""
    try:
        before = Ended.model_validate_json(run.ended.read_bytes())
    except FileNotFoundError:
        before = None
    if before is None or before.failed_by_peer or not before.message:
        replace(run.ended, ended.model_dump_json())


def _attempt(job: WorkerJob, run: RunFolder) -> Ended:
    """Run the job and return its end, with one line on the reason of a failure."""
    try:
        _train(job, run)
    except Drained:
        return Ended(code=ExitCode.DRAINED)
    except Rollback as e:
        return Ended(code=ExitCode.BACK, jumps=e.jumps)
    except Fault as e:
        return Ended(code=e.code, message=str(e), bad_host=isinstance(e, BadHost))
    except MemoryError as e:
        return _host_oom("no memory could be allocated", e)
    except Exception as e:
        traceback.print_exc()
        return _oom(e) or _unforeseen(e)
    return Ended(code=ExitCode.COMPLETED)


def _unforeseen(error: Exception) -> Ended:
    from trainer.parallel import ddp

    if ddp.is_lost_peer(error):
        message = f"another process of this job has gone: {_line(error)}"
        return Ended(code=ExitCode.INFRASTRUCTURE, message=message, failed_by_peer=True)
    code = ExitCode.INFRASTRUCTURE if isinstance(error, (OSError, RuntimeError)) else ExitCode.USER_ERROR
    return Ended(code=code, message=f"{type(error).__name__}: {_line(error)}")


def _train(job: WorkerJob, run: RunFolder) -> None:
    import torch

    from trainer.parallel import ddp
    from trainer.training import determinism
    from trainer.training.loop import TrainingLoop

    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if usable < job.gpus:
        built = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
        raise Fault(f"torch can use {usable} of {job.gpus} GPUs; the driver may be too old for {built}")
    if usable:
        determinism.begin()
    loop = TrainingLoop(job, run)
    try:
        loop.run()
    except (Drained, Rollback):
        ddp.leave()
        raise
    except Exception as e:
        if isinstance(e, MemoryError) or _oom(e):
            e.add_note(loop.memory())
        raise
    ddp.leave()


def _oom(error: BaseException) -> Ended | None:
    """Return the end for a lack of memory; None for other errors."""
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError):
        message = f"GPU memory is too small: {_line(error)}{_notes(error)}; lower train.micro_batch"
        return Ended(code=ExitCode.OOM, message=message, ran_out="device")
    cannot = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if cannot or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return _host_oom(_line(error), error)
    return None


def _host_oom(what: str, error: BaseException) -> Ended:
    message = f"host memory is too small: {what}{_notes(error)}; use a larger machine or a lower train.micro_batch"
    return Ended(code=ExitCode.OOM, message=message, ran_out="host")


def _rank(which: str) -> int | None:
    """Return this process's rank in a launcher's variable (all machines or this one); None for a single process."""
    return int(os.environ[which]) if which in os.environ else None


def _notes(error: BaseException) -> str:
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the agent decides when to save and stop
    if _rank("RANK") is not None:
        die_with_parent(os.getppid())  # the launcher starts each process in its own session
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # see parallel.ddp._NEVER_FREED
