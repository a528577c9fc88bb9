"""Program that counts, and continues from the last committed count after a restart.

The contents of $GPUBROKER_CHECKPOINT_DIR are committed every few seconds and restored before the next start.
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
        draft = file.with_suffix(".new")
        draft.write_text(str(count))
        draft.replace(file)  # atomic: the file is never half-written
        print(f"counted to {count}", flush=True)


if __name__ == "__main__":
    main()
