"""Calls a daemon ten times a second as another team, in a separate process that the attacker's load does not delay.

Reads the address and the token from the first line of its input as JSON, and ends with its input. Prints
{"latencies_ms", "failed"}.
"""

import json
import sys
import threading
import time
import urllib.request

ANSWER_S = 30.0
EVERY_S = 0.1


def main() -> None:
    document = json.loads(sys.stdin.readline())
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    latencies_ms: list[float] = []
    failed = 0
    request = urllib.request.Request(
        f"{document['url']}/v1/jobs", headers={"Authorization": f"Bearer {document['token']}"}
    )
    while not ended.is_set():
        started = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                answer.read()
        except OSError:
            failed += 1
        latencies_ms.append((time.perf_counter() - started) * 1000)
        ended.wait(EVERY_S)
    print(json.dumps({"latencies_ms": latencies_ms, "failed": failed}))


if __name__ == "__main__":
    main()
