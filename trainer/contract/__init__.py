"""What broker and trainer agree on: configuration, object keys, documents, outcomes. No torch in here.

| module | holds |
|---|---|
| `train` | `TrainConfig`: what to fine-tune, on what, and how |
| `script` | `ScriptConfig`: the user's own program |
| `rendezvous` | the documents that meet in the blob store: spec, desired, grant, beat, final, manifest |
| `keys` | where each of them lies |
| `data` | how rows are read and prompts rendered, the same before buying and while training |
"""
