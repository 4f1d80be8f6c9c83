"""`flashpatch audit --trace` and `--profile`: exit codes, JSON against its schema, the HTML file, the README's snippet."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("flashpatch.cli", reason="needs the editable install: pip install -e .")

import jsonschema
import transformers
from click.testing import CliRunner

import flashpatch
from flashpatch import cli

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
SHORT = ("--trace", "--seqlen", 12)


def audit(*arguments):
    result = CliRunner().invoke(cli.main, ["audit", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("traced")
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=64)
    transformers.LlamaForCausalLM(llama).save_pretrained(root / "llama")
    bloom = transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=2)
    transformers.BloomForCausalLM(bloom).save_pretrained(root / "bloom")
    return root


def test_the_readmes_first_example_is_the_tutorials_and_runs():
    section = README.split("## Is my stack really using it?")[1].split("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    assert len(code.splitlines()) == 3 and "F.scaled_dot_product_attention(q, k, v)" in code
    names = {"flashpatch": flashpatch, "F": F, **{name: torch.randn(1, 4, 64, 32) for name in "qkv"}}
    exec(code, names)
    (row,) = names["t"].report.rows
    assert row.family != "sdpa_flash" and "not float32" in row.forecast and "not float32" in str(names["t"])


def test_the_readmes_first_screen_prints_what_it_shows():
    shown = re.search(r"```text\n(.*?)\n```", README, re.DOTALL).group(1)
    with flashpatch.trace() as t:
        F.scaled_dot_product_attention(*(torch.randn(2, 8, 1024, 64) for _ in "qkv"))
    assert str(t) == shown


def test_a_healthy_model_keeps_every_budget(folders):
    result = audit(
        folders / "llama", *SHORT, "--dtype", "bf16", "--expect", "flash", "--forbid", "math,eager", "--strict"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("SDPA, CPU flash") == 2 and "BUDGET" not in result.stdout
    assert "Not seen: what a GPU would run: these calls ran on a CPU" in result.stdout


def test_a_budget_on_a_cpu_says_what_it_does_not_say(folders, tmp_path):
    target = tmp_path / "report.html"
    result = audit(folders / "llama", *SHORT, "--dtype", "fp32", "--expect", "flash", "--html", target)
    assert (
        result.exit_code == 3
        and "BUDGET --expect flash: model.layers.0.self_attn and 1 more ran torch's CPU" in result.stdout
    )
    assert "what a GPU would run" in target.read_text(encoding="utf-8")
    result = audit(folders / "llama", *SHORT, "--dtype", "fp32", "--expect", "flash_cpu")
    assert result.exit_code == 0 and "Not seen: what a GPU would run" in result.stdout
    assert "what a GPU would run" not in audit(folders / "llama", *SHORT).stdout


@pytest.mark.parametrize("budget", [("--forbid", "math,eager"), ("--expect", "flash"), ("--strict",)], ids=" ".join)
def test_a_broken_budget_exits_with_3_and_one_line(folders, budget):
    result = audit(folders / "bloom", *SHORT, *budget)
    assert result.exit_code == 3
    lines = [line for line in result.stdout.splitlines() if line.startswith("BUDGET")]
    if budget[0] != "--strict":
        (line,) = lines
        assert "transformer.h.0.self_attention and 1 more" in line and "computes attention itself" in line
    assert audit(folders / "bloom", *SHORT).exit_code == 0


def test_declines_have_a_budget_of_their_own(folders):
    result = audit(folders / "llama", *SHORT, "--patch", "--max-declines", 0)
    assert result.exit_code == 3 and "BUDGET --max-declines 0: model.layers.0.self_attn 2 calls" in result.stdout
    assert audit(folders / "llama", *SHORT, "--patch", "--max-declines", 2).exit_code == 0


class _Page(HTMLParser):
    """Every address a page would fetch, its text, and its tags' balance."""

    def __init__(self):
        super().__init__()
        self.fetched, self.text, self.open = [], [], []

    def handle_starttag(self, tag, attributes):
        self.fetched += [v for k, v in attributes if k in ("src", "href") and v and not v.startswith("data:")]
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_json_and_html(folders, tmp_path):
    target = tmp_path / "report.html"
    result = audit(folders / "bloom", *SHORT, "--train", "--forbid", "eager", "--json", "--html", target)
    document = json.loads(result.stdout)
    jsonschema.validate(document, json.loads(audit("--json-schema").stdout))
    assert document["exit_code"] == result.exit_code == 3 and len(document["violations"]) == 2
    assert [row["backward_calls"] for row in document["rows"]] == [1, 1]
    page = _Page()
    page.feed(target.read_text(encoding="utf-8"))
    words = "".join(page.text)
    assert page.open == [] and page.fetched == [] and "url(" not in target.read_text()
    assert "viewport" in target.read_text() and "<script" not in target.read_text()
    assert (
        "computes attention itself" in words and "transformer.h.1.self_attention" in words and "--forbid eager" in words
    )
    assert "&lt;wbr&gt;" not in target.read_text()


def test_what_models_say_is_escaped_in_html(tmp_path):
    from flashpatch.cli import html

    class Sly(torch.nn.Module):
        def forward(self, q):
            return q.softmax(-1) @ q if q is None else torch.softmax(q @ q.mT, -1) @ q

    model = torch.nn.Module()
    model.add_module("<script>alert(1)</script>", Sly())
    model.forward = lambda q: next(model.children())(q)
    with flashpatch.trace(model) as t:
        model(torch.randn(1, 2, 8, 8))
    html.write(str(tmp_path / "x.html"), "trace.html.jinja", title="<b>", report=t.report)
    assert "<script" not in (tmp_path / "x.html").read_text() and "&lt;script&gt;" in (tmp_path / "x.html").read_text()


def test_profile_of_a_file(tmp_path):
    path = tmp_path / "trace.json.gz"
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.softmax(q @ k.mT, -1) @ v
    profiler.export_chrome_trace(str(path))
    result = audit("--profile", path, "--json")
    jsonschema.validate(json.loads(result.stdout), json.loads(audit("--json-schema").stdout))
    assert result.exit_code == 0 and "whole score matrix" in json.loads(result.stdout)["verdict"]
    result = audit("--profile", path, "--forbid", "math")
    assert result.exit_code == 3 and "BUDGET --forbid math" in result.stdout
    assert audit("--profile", path, "--expect", "dense").exit_code == 0


def test_a_cpus_profile_does_not_show_what_a_gpu_runs(tmp_path):
    path = tmp_path / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        F.scaled_dot_product_attention(*(torch.randn(1, 2, 32, 16) for _ in range(3)))
    profiler.export_chrome_trace(str(path))
    result = audit("--profile", path, "--expect", "flash")
    assert result.exit_code == 3 and "what a GPU would run it does not show" in result.stdout
    assert audit("--profile", path, "--expect", "flash_cpu").exit_code == 0


BAD = {
    "--forbid nonsense": ("{llama}", "--trace", "--forbid", "nonsense"),
    "without a model": ("--trace",),
    "a budget without --trace": ("{llama}", "--expect", "flash"),
    "no declines without --trace": ("{llama}", "--max-declines", "0"),
    "a kind that is empty": ("{llama}", "--trace", "--expect", "flash,"),
    "no kind at all": ("{llama}", "--trace", "--forbid", ""),
    "declines without --patch": ("{llama}", "--trace", "--max-declines", "0"),
    "--gpu": ("{llama}", "--trace", "--gpu", "h200"),
    "--profile and a model": ("{llama}", "--profile", "x.json"),
    "no such file": ("--profile", "/nowhere/x.json"),
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_wrong_usage_is_a_sentence(folders, arguments):
    result = audit(*(argument.format(llama=folders / "llama") for argument in arguments))
    assert result.exit_code == 2 and "Traceback" not in result.output and result.stdout == ""
    assert len(result.stderr.strip()) > 40
