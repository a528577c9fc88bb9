"""The agent: reads its spec, starts the worker, beats, ships logs, obeys, and says how it ended. Never imports torch.

| module | holds |
|---|---|
| `environment` | what the launcher must give |
| `run` | one attempt from the first beat to `final.json` |
| `prepare` | spec, grant, data, code and checkpoint brought to this machine |
| `child` | the worker or the user's program as a process, and what its exit means |
| `beat` | the sign of life |
| `orders` | `desired.json`, the renewed grant and the dead-man's switch |
| `notices` | the machine's own word that it will be taken away |
| `logs` | redaction, bounds and shipping of the output |
| `saver` | snapshots on this disk become committed checkpoints |
| `script_tree` | snapshots of a script's checkpoint folder |
| `tether` | a child that dies with its parent |
"""
