"""Prints what `tersor eval --json` and `tersor bench --json` measured as one table.

usage: demo_table.py TITLE PREFIX [TITLE PREFIX …]; reads PREFIX-eval.json, PREFIX-bench.json and, if it is
there, PREFIX-int8-eval.json: the same network quantized only
"""

import json
import os
import sys


def read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def main(arguments):
    rule = "-" * 96
    for title, prefix in zip(arguments[::2], arguments[1::2]):
        quality, bench = read(prefix + "-eval.json"), read(prefix + "-bench.json")
        before, after = (f["bytes"] for f in bench["files"])
        print(rule)
        print(f"{title} ({bench['threads']} thread, {bench['isa']})")
        if "accuracy" in quality:
            a, b = 100 * quality["accuracy_original"], 100 * quality["accuracy"]
            int8 = prefix + "-int8-eval.json"
            alone = f"; INT8 alone: {100 * read(int8)['accuracy']:.2f} %" if os.path.exists(int8) else ""
            print(f"  accuracy    {a:.2f} % -> {b:.2f} %   ({b - a:+.2f} points{alone})")
        else:
            print(f"  outputs     cosine {quality['cosine']:.4f}, SQNR {quality['sqnr_db']:.1f} dB to the original's")
        print(f"  file        {before:,} -> {after:,} bytes   ({before / after:.2f}x smaller)")
        print(f"  {'':10}{'original':>30}{'compressed':>36}")
        head = f"{'p50 us':>10}{'p99 us':>10}{'items/s':>12}"
        print(f"  {'':10}{head}    {head}{'speed-up':>12}")
        for batch in bench["batches"]:
            one, two = batch["results"]
            cells = "    ".join(f"{r['p50_us']:>10.1f}{r['p99_us']:>10.1f}{r['items_per_second']:>12,.0f}" for r in (one, two))
            print(f"  batch {batch['batch']:<4}{cells}{two['ratio']:>11.2f}x")
    print(rule)


main(sys.argv[1:])
