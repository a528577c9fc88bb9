"""A program that counts, and goes on counting where it was stopped.

What lies in $GPUBROKER_CHECKPOINT_DIR is committed every few seconds and put back before the next start.
"""

import os
import sys
import time
from pathlib import Path


def main() -> None:
    goal = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    file = Path(os.environ["GPUBROKER_CHECKPOINT_DIR"]) / "count.txt"
    count = int(file.read_text()) if file.exists() else 0
    print(f"starting at {count}", flush=True)
    while count < goal:
        time.sleep(1)
        count += 1
        beside = file.with_suffix(".new")
        beside.write_text(str(count))
        beside.replace(file)  # never half-written
        print(f"counted to {count}", flush=True)


if __name__ == "__main__":
    main()
