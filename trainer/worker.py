"""The process that trains: `python -m trainer.worker RUN_FOLDER`, started and tied to its life by the agent."""

import os
import signal
import sys
import traceback
from pathlib import Path

from trainer.agent.tether import tie
from trainer.contract.rendezvous import ExitCode
from trainer.faults import Drained, Fault
from trainer.ipc import RunFolder, WorkerJob, replace


def main(root: Path) -> ExitCode:
    """Runs the job in the folder; the reason of a failure goes to its `error` file, in one line."""
    run = RunFolder(root=root)
    job = WorkerJob.model_validate_json(run.job.read_bytes())
    try:
        _train(job, run)
    except Drained:
        return ExitCode.DRAINED
    except Fault as e:
        return _failed(run, e.code, str(e))
    except MemoryError:
        return _failed(run, ExitCode.OOM, "host memory is too small; take a larger machine or a lower micro_batch")
    except Exception as e:
        traceback.print_exc()
        if _is_device_oom(e):
            return _failed(run, ExitCode.OOM, f"GPU memory is too small: {_line(e)}; lower train.micro_batch")
        if isinstance(e, (OSError, RuntimeError)):
            return _failed(run, ExitCode.INFRASTRUCTURE, f"{type(e).__name__}: {_line(e)}")
        return _failed(run, ExitCode.USER_ERROR, f"{type(e).__name__}: {_line(e)}")
    return ExitCode.COMPLETED


def _train(job: WorkerJob, run: RunFolder) -> None:
    import torch

    from trainer.loop import Loop

    if torch.cuda.is_available():
        # Without this a resumed run may differ from an uninterrupted one in the last bits.
        torch.use_deterministic_algorithms(True, warn_only=True)
    Loop(job, run).run()


def _is_device_oom(error: BaseException) -> bool:
    import torch

    host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return host or isinstance(error, torch.cuda.OutOfMemoryError)


def _failed(run: RunFolder, code: ExitCode, reason: str) -> ExitCode:
    print(f"failed: {reason}", flush=True)
    if int(os.environ.get("RANK", "0")) == 0 or not run.error.exists():
        replace(run.error, reason)
    return code


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # The agent alone decides when to save and stop.
    if "RANK" in os.environ:
        tie(os.getppid())  # The launcher starts each process in a session of its own.
    sys.exit(main(Path(sys.argv[1])))
