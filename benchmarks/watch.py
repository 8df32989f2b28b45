"""What the live page takes: 100 runs of 100,000 log lines in a real browser, and what a run loses to being watched.

    python benchmarks/watch.py [--runs 100] [--lines 100000] [--work FOLDER] [--rounds 20]

The page is opened by Chromium (Playwright). "First paint" is the browser's own figure, "first curves" is when the first
plot has drawn points. A zoom ends when all visible plots have drawn the points of the new range. The files are in the
system's cache, as those of running runs are. For the cost, a run in this process trains a small network and writes a
line every ten steps; the server and a client that polls it as a page does are stopped (SIGSTOP) every other round.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

CHROMIUM = "/usr/bin/chromium"
PAGE = Path(__file__).parents[1] / "src/trainwright/watch/page"
CONFIG = """name: {name}
model: {{type: net.Net, width: {width}}}
data: {{train: {{type: digits}}, eval: {{valid: {{type: digits}}}}}}
trainer: {{max_steps: {steps}, optimizer: {{type: adamw, lr: 0.001}}}}
log: {{every_steps: 10}}
"""
DRAWN = """() => {
  const shown = [...document.querySelectorAll("canvas")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.top < innerHeight && box.bottom > 0;
  });
  return shown.length > 0
    && shown.every((each) => each.dataset.drawn && JSON.parse(each.dataset.drawn).series.length >= %d);
}"""
LOADED = """async () => (await ask("api/runs")).runs.filter((run) => state.selected.has(run.name))
  .every((run) => !/sample/.test(run.version.curves))"""
WAITED = "() => [...plots.values()].every((each) => !each.isVisible || !each.isWaiting)"


def write_runs(folder: Path, num_runs: int, num_lines: int) -> int:
    """Writes runs as trainwright does, with random curves, and returns their size in bytes."""
    total = 0
    for number in range(num_runs):
        run = folder / f"sweep/run-{number:03d}"
        run.mkdir(parents=True, exist_ok=True)
        steps = 10 * num_lines
        (run / "config.yaml").write_text(CONFIG.format(name=f"sweep/run-{number:03d}", width=number, steps=steps))
        path = run / "metrics.json"
        if not path.exists():
            draw = np.random.default_rng(number)
            loss = 3 * np.exp(-np.arange(num_lines) / (num_lines / 3)) + 0.1 * draw.random(num_lines)
            norms, seconds = draw.random(num_lines), 0.1 + 0.01 * draw.random(num_lines)
            with path.open("w") as file:
                for index in range(num_lines):
                    line = {"step": 10 * (index + 1), "loss": float(loss[index]), "grad_norm": float(norms[index])}
                    line |= {"lr": 1e-3 * (1 - index / num_lines), "seconds_per_step": float(seconds[index])}
                    line["samples_per_second"] = 32 / float(seconds[index])
                    if index % 100 == 99:
                        line["valid/loss"] = float(loss[index]) + 0.1
                    file.write(json.dumps(line) + "\n")
        total += path.stat().st_size
    return total


def start_server(folder: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "trainwright", "watch", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r"http://\S+", server.stdout.readline())
    assert found
    return server, found[0]


def memory_of(process: subprocess.Popen[str]) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1e3


def measure_page(folder: Path) -> list[tuple[str, str]]:
    from playwright.sync_api import sync_playwright

    rows = []
    server, url = start_server(folder)
    try:
        with sync_playwright() as browsers:
            browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1440, "height": 1000})

            def seconds_until_loaded() -> float:
                began = time.perf_counter()
                while not page.evaluate(LOADED):
                    time.sleep(0.1)
                return time.perf_counter() - began

            began = time.perf_counter()
            page.goto(url, wait_until="commit")
            page.wait_for_function(DRAWN % 1)
            first_curves = time.perf_counter() - began
            paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            listed = page.locator(".run").count()
            rows += [
                ("first paint", f"{paint:.0f} ms"),
                (f"{listed} runs listed, first curves", f"{first_curves:.2f} s"),
            ]
            rows.append(("6 runs read in full", f"{seconds_until_loaded():.1f} s"))
            began = time.perf_counter()
            page.click("#all")
            page.wait_for_function(DRAWN % listed)
            rows.append((f"{listed} runs selected: all curves drawn (samples)", f"{time.perf_counter() - began:.1f} s"))
            rows.append((f"{listed} runs read in full", f"{seconds_until_loaded():.0f} s"))
            page.wait_for_timeout(3000)
            for names, select in ((f"{listed} runs", None), ("6 runs", "none")):
                if select:
                    page.click("#none")
                    for box in page.locator(".run input").all()[:6]:
                        box.check()
                    page.wait_for_function(DRAWN % 6)
                box = page.locator("canvas").first.bounding_box()
                times = []
                for number in range(5):
                    left, right = 0.3 + 0.02 * number, 0.6
                    page.mouse.move(box["x"] + box["width"] * left, box["y"] + 80)
                    page.mouse.down()
                    page.mouse.move(box["x"] + box["width"] * right, box["y"] + 90)
                    began = time.perf_counter()
                    with page.expect_response(lambda answer: "api/curves" in answer.url):
                        page.mouse.up()
                    page.wait_for_function(WAITED)
                    times.append(time.perf_counter() - began)
                    page.keyboard.press("Escape")
                    page.dblclick("canvas >> nth=0")
                    page.wait_for_timeout(700)
                rows.append((f"a zoom with {names} (median of 5)", f"{1000 * statistics.median(times):.0f} ms"))
            rows.append(("memory of the server", f"{memory_of(server):,.0f} MB"))
            used = cpu_seconds(server.pid)
            page.wait_for_timeout(10_000)
            rows.append(("CPU of the server while nothing changes", f"{10 * (cpu_seconds(server.pid) - used):.1f} %"))
            browser.close()
    finally:
        server.terminate()
        server.wait()
    return rows


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def poll(url: str, run: str) -> None:
    """Requests what a page requests of one running run, in its period of two seconds."""
    query = f"runs=%5B%22{run}%22%5D"
    paths = ["api/runs", f"api/describe?{query}"]
    paths += [f"api/curves?{query}&names=%5B%22{name}%22%5D&points=900" for name in ("loss", "lr", "grad_norm")]
    while True:
        for path in paths:
            with urllib.request.urlopen(f"{url}/{path}") as answer:
                content = answer.read()
                if content[:2] == b"\x1f\x8b":
                    gzip.decompress(content)
        time.sleep(2)


def measure_cost(work: Path, rounds: int) -> list[tuple[str, str]]:
    import torch
    from torch import nn

    from trainwright import Hook, train

    torch.set_num_threads(1)
    server, url = start_server(work)
    client = subprocess.Popen([sys.executable, __file__, "--poll", url, "--poll-run", "watched"])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    data = [{"x": torch.randn(64), "labels": torch.tensor(index % 10)} for index in range(512)]
    times: dict[bool, list[float]] = {True: [], False: []}
    seconds_per_round = 5.0

    class Alternate(Hook):
        """Stops the server and its client every other round."""

        def before_train(self) -> None:
            self.watched, self.began, self.steps = True, time.perf_counter(), 0

        def after_step(self) -> None:
            self.steps += 1
            now = time.perf_counter()
            if now - self.began < seconds_per_round:
                return
            times[self.watched].append((now - self.began) / self.steps)
            self.watched = not self.watched
            for process in (server, client):
                process.send_signal(signal.SIGCONT if self.watched else signal.SIGSTOP)
            self.began, self.steps = time.perf_counter(), 0
            if len(times[False]) >= rounds:
                self.trainer.stop("measured")

    try:
        train(
            model,
            data,
            forward=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["labels"]),
            hooks=[Alternate()],
            max_steps=10**7,
            batch_size=32,
            name="watched",
            overrides=[f"output_dir={work}", "writers=[json]", "log.every_steps=10"],
        )
    finally:
        for process in (client, server):
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait()
    pairs = [watched / alone for watched, alone in zip(times[True], times[False], strict=False)]
    alone = statistics.median(times[False])
    return [
        ("a step, not watched", f"{1e6 * alone:.0f} µs"),
        (
            f"the same step while it is watched (median of {len(pairs)} pairs)",
            f"{100 * (statistics.median(pairs) - 1):+.1f} %",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", choices=("page", "cost", "report"))
    parser.add_argument("--poll")
    parser.add_argument("--poll-run")
    options = parser.parse_args()
    if options.poll:
        time.sleep(2)
        poll(options.poll, options.poll_run)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        rows = []
        size = write_runs(work / "runs", options.runs, options.lines) if options.only != "cost" else 0
        if options.only in (None, "page"):
            page = sum(path.stat().st_size for path in PAGE.iterdir())
            rows += [
                ("files of the page", f"{page / 1e3:.0f} kB"),
                ("metrics.json of all runs", f"{size / 1e6:,.0f} MB"),
            ]
            rows += measure_page(work / "runs")
        if options.only in (None, "report"):
            from trainwright.watch.report import write_report

            began = time.perf_counter()
            report = write_report(next((work / "runs" / "sweep").iterdir()))
            rows.append((f"report.html of {options.lines:,} lines", f"{report.stat().st_size / 1e3:.0f} kB"))
            rows.append(("writing it", f"{time.perf_counter() - began:.2f} s"))
            report.unlink()
        if options.only in (None, "cost"):
            rows += measure_cost(work / "cost", options.rounds)
    print("| what | measured |\n|---|---|")
    print("\n".join(f"| {name} | {value} |" for name, value in rows))


if __name__ == "__main__":
    main()
