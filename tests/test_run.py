"""`flashpatch run`: the script behaves as under python, and the report says what its models did."""

import json
import subprocess
import sys

import jsonschema
import pytest

SCRIPT = """
import sys
import helper_beside_the_script
import torch
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, XLNetConfig, XLNetModel

print(sys.argv[1:], __name__)
config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
ids = torch.randint(0, 50, (2, 9))
LlamaForCausalLM(config)(ids, labels=ids).loss.backward()
LlamaForCausalLM._from_config(config, attn_implementation="eager")(ids)
BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2))(ids)
XLNetModel(XLNetConfig(vocab_size=50, d_model=32, n_layer=1, n_head=2, d_inner=32))(ids)
if sys.argv[-1] != "-x":
    sys.exit(int(sys.argv[-1]))
raise KeyError("in the script")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper_beside_the_script.py").write_text("")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def run(*arguments, **options):
    command = [sys.executable, "-c", "from flashpatch.cli import main; main()", "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_a_script_runs_as_it_is_and_the_report_names_what_ran(script, tmp_path):
    done = run("--report", tmp_path / "report.json", script, "--lr", "7")
    assert done.returncode == 7, done.stderr
    assert done.stdout == "['--lr', '7'] __main__\n"
    report = json.loads((tmp_path / "report.json").read_text())
    jsonschema.validate(report, json.loads(run("--json-schema").stdout))
    layers = {layer["path"]: layer for layer in report["layers"]}
    assert {path: layer["calls"] for path, layer in layers.items()} == {
        "model.layers.0.self_attn": 1,
        "transformer.h.0.self_attention": 1,
    }
    assert all([reason.split(":")[0] for reason in layer["declines"]] == ["no_gpu"] for layer in layers.values())
    # the decoder inside has what its model was asked for; BLOOM's has what nobody asked for, and is patched
    assert report["honoured"] == ["LlamaForCausalLM (eager)", "LlamaModel (eager)"]
    assert "Bloom" not in done.stderr
    assert report["unreachable"] == ["XLNetModel"]
    assert "model.layers.0.self_attn" in done.stderr
    assert "XLNetModel computes attention itself" in done.stderr


def test_a_script_that_raises_keeps_its_traceback_and_its_report(script):
    done = run(script, "-x")
    assert done.returncode == 1
    assert "KeyError: 'in the script'" in done.stderr
    first = done.stderr.split("Traceback (most recent call last):\n")[1].splitlines()[0]
    assert f'File "{script}"' in first  # as under python, whose own frames nobody sees
    assert "model.layers.0.self_attn" in done.stderr


def test_strict_makes_a_decline_an_error_and_a_missing_script_is_wrong_usage(script, tmp_path):
    done = run("--strict", script, "0")
    assert (done.returncode, "DeclinedError" in done.stderr) == (1, True)
    done = run(tmp_path / "none.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    done = run("-m", "helper_beside_the_script", cwd=script.parent)
    assert done.returncode == 0
    assert "no attention of helper_beside_the_script came to flashpatch" in done.stderr


def test_what_cannot_start_is_a_sentence_and_an_interrupt_is_one(tmp_path):
    done = run("-m", "no_such_module")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "there is no module no_such_module" in done.stderr
    (tmp_path / "__main__.py").write_text("import sys\nprint(sys.argv[1:], __name__)\nraise KeyboardInterrupt\n")
    done = run(tmp_path, "--x")
    assert (done.returncode, done.stdout) == (130, "['--x'] __main__\n") and "KeyboardInterrupt" in done.stderr
