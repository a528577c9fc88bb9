"""Agent: reads its spec, starts the worker, sends heartbeats and logs, follows the broker, and reports the outcome.

The package never imports torch.

| module | holds |
|---|---|
| `agent` | one attempt from the first heartbeat to `final.json` |
| `lifecycle` | the steps that train jobs and script jobs share |
| `train_runner` | worker with its data, checkpoints, rollbacks and trackers |
| `script_runner` | the user's program and its checkpoint folder |
| `conclusion` | pure rules: outcome of the attempt from the end of its program |
| `desired_state` | watcher of `desired.json`, the renewed grant and the dead-man's switch |
| `preemption_notice` | the cloud's notice that the machine will be preempted |
| `final_report` | the last log lines and `final.json` |
| `deliver_results` | publishing of results after they were verified in the store |
| `base` | environment, state, and preparation of inputs |
| `process` | child processes: worker or user program, and trackers; host check |
| `upload` | heartbeats, logs, checkpoints, token cache |
"""
