"""Documents, configurations and object keys shared by broker and trainer; they import no torch.

| module | holds |
|---|---|
| `train` | `TrainConfig`: model, data and method of a fine-tune |
| `script` | `ScriptConfig`: the user's own program |
| `documents` | documents that broker and agent exchange through the blob store |
| `object_keys` | the key of each document |
| `checkpoint_format` | the files of a checkpoint, and their verification |
"""
