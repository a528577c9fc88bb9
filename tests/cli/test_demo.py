"""`make demo` in small: a real daemon, real processes, a real preemption, over a tiny model made here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from broker.cli.core.exit_codes import CliError
from examples import demo

ROOT = Path(__file__).parents[2]
SPEC = """\
name: tiny
cap_usd: 0.5
train:
  model: model
  data: {path: words.csv, prompt: "{word}", completion: "{meaning}"}
  optim: {lr: 1e-2}
  max_steps: 2000
  global_batch: 2
  micro_batch: 2
  max_length: 16
  samples: {prompts: [w1 w2], max_new_tokens: 4}
checkpoint: {every_s: 1}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """Return a spec with a two-layer Llama and forty rows next to it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(1)
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1} | {f"w{i}": i + 2 for i in range(98)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=100, num_key_value_heads=1, eos_token_id=0, bos_token_id=None, **size)
    )
    model.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(
        tmp_path / "model"
    )
    rows = [f"w{i},w{i + 40} w{i + 41}" for i in range(40)]
    (tmp_path / "words.csv").write_text("\n".join(["word,meaning", *rows]))
    path = tmp_path / "job.yaml"
    path.write_text(SPEC)
    return path


def left_over(home: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if demo._below(p, home)]


def test_the_demo_survives_its_preemption_and_leaves_nothing_behind(spec: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "examples.demo", "--home", str(home), "--spec", str(spec), "--lifetime", "9"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1800)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report == json.loads((home / "summary.json").read_text())
    assert (report["state"], report["attempts"], report["preemptions"]) == ("succeeded", 2, 1)
    assert report["heldout_loss_after"] < report["heldout_loss_before"]
    assert 0 < report["usd"] < report["usd_on_demand"] < 0.5
    assert (Path(report["adapter"]) / "adapter_model.safetensors").exists()
    assert (home / "results" / "loss.png").exists()
    for shown in ("(simulated)", "attempt.preempted", "held-out loss", "base", "tuned", "loss by optimizer step"):
        assert shown in ran.stdout
    assert not left_over(home)


PARAMETERS = """\
model, data, cap_usd = "model", "words.csv", "0.5"
columns = {"prompt": "{word}", "completion": "{meaning}"}
train = {"max_steps": 150, "global_batch": 2, "micro_batch": 2, "max_length": 16, "optim": {"lr": 1e-2}}
"""


def test_the_first_notebook_shows_quote_progress_and_receipt(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("GPUBROKER_HOME", "GPUBROKER_URL", "GPUBROKER_TOKEN"):
        monkeypatch.setenv(name, "")  # restored after `running` has set them
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / "first_job.ipynb", as_version=4)
    parameters, quote, fit, receipt, metrics, files = (cell for cell in notebook.cells if cell.cell_type == "code")
    parameters.source = PARAMETERS.replace('"model"', repr(str(spec.with_name("model"))))
    with demo.running(tmp_path / "home", lifetime_s=3600):
        nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "90 % chance at most $" in quote.outputs[0].data["text/html"]
    (panel,) = fit.outputs
    assert panel.output_type == "display_data"
    for shown in ("<progress", "<svg", "job.succeeded", "step 150 of 150"):
        assert shown in panel.data["text/html"]
    assert "job.succeeded" in panel.data["text/plain"]
    assert "difference" in receipt.outputs[0].data["text/html"]
    assert "tokens/s" in metrics.outputs[0].data["text/html"]
    assert "adapter_model.safetensors" in files.outputs[0].data["text/plain"]


def test_the_demo_does_not_start_over_a_running_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "kept").touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], cwd=home, stdin=subprocess.PIPE) as running:
        ran = subprocess.run(
            [sys.executable, "-m", "examples.demo", "--home", str(home)], capture_output=True, text=True, timeout=600
        )
        assert ran.returncode == 1
        assert f"kill {running.pid}" in ran.stderr
        assert (home / "kept").exists()
        running.kill()


def test_the_demo_empties_no_folder_but_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(CliError, match="which no demo wrote"):
        demo.empty(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
    (tmp_path / demo.MARK).touch()
    (tmp_path / "models").mkdir()
    demo.empty(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["models"]
