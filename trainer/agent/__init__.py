"""Agent: reads its spec, starts the worker, sends heartbeats and logs, follows the broker, and reports the outcome.

It never imports torch.

| module | holds |
|---|---|
| `agent` | one attempt from the first heartbeat to `final.json` |
| `desired_state` | watcher of `desired.json`, the renewed grant and the dead-man's switch |
| `preemption_notice` | the cloud's notice that the machine will be preempted |
| `final_report` | the last log lines and `final.json` |
| `deliver_results` | publishing of verified results |
| `base` | environment, state, and preparation of inputs |
| `process` | the worker or user program as a process, trackers, host check |
| `upload` | heartbeats, logs, checkpoints, token cache |
"""
