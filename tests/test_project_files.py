"""Files around the package: versions, workflows, the Dockerfile, issue forms, release notes, and what is built."""

from __future__ import annotations

import importlib.util
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import trainwright
from trainwright.commands.new import Kind

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
GITHUB = ROOT / ".github"
WORKFLOWS = {path.name: path.read_text("utf-8") for path in (GITHUB / "workflows").glob("*.yml")}
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]


def load_release():
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load_release()


def steps(workflow):
    return [step for job in yaml.safe_load(WORKFLOWS[workflow])["jobs"].values() for step in job["steps"]]


def commands(workflow):
    return "\n".join(step["run"] for step in steps(workflow) if "run" in step)


def test_every_file_has_the_same_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    newest, date = re.search(r"^## \[(.+)\] - (.+)$", CHANGELOG, re.MULTILINE).groups()
    assert {trainwright.__version__, PROJECT["version"], newest, citation["version"]} == {PROJECT["version"]}
    assert str(citation.get("date-released", "unreleased")) == date
    assert f"| {newest.rpartition('.')[0]}.x | yes |" in (ROOT / "SECURITY.md").read_text("utf-8")


def test_citation_describes_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    assert citation["abstract"].endswith(PROJECT["description"].partition(" any ")[2])


def test_workflows_call_targets_and_tools_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    called = {name for workflow in WORKFLOWS for name in re.findall(r"\bmake ([a-z-]+)", commands(workflow))}
    assert called
    assert called <= targets
    assert all((ROOT / path).is_file() for path in re.findall(r"\btools/\w+\.py", commands("release.yml")))


def test_workflows_pin_the_version_of_every_action_and_limit_every_job():
    for workflow, text in WORKFLOWS.items():
        for step in steps(workflow):
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step.get("uses", "a/b@v1.0.0")), step
        content = yaml.safe_load(text)
        assert content["permissions"] == {"contents": "read"}
        assert all("timeout-minutes" in job for job in content["jobs"].values()), workflow


def test_ci_tests_the_python_and_torch_versions_that_the_package_supports():
    matrix = yaml.safe_load(WORKFLOWS["ci.yml"])["jobs"]["tests"]["strategy"]["matrix"]
    classifiers = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert matrix["python"] == classifiers
    pins = dict(re.findall(r"^(torch\w*)==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    [bound] = [each for each in PROJECT["dependencies"] if each.startswith("torch>=")]
    assert matrix["torch"] == [re.search(r">=([\d.]+)", bound)[1] + ".0", pins["torch"]]
    assert pins in matrix["include"]


def test_a_release_is_tested_before_it_is_published_without_a_token():
    jobs = yaml.safe_load(WORKFLOWS["release.yml"])["jobs"]
    assert set(jobs["publish"]["needs"]) == {"build", "test"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert "secrets." not in WORKFLOWS["release.yml"]
    [kinds] = re.findall(r"for template in (.+); do", commands("release.yml"))
    assert set(kinds.split()) == {kind.value for kind in Kind}


def test_the_dockerfile_copies_files_that_exist_and_runs_as_a_user():
    text = (ROOT / "Dockerfile").read_text("utf-8")
    copied = [name for line in re.findall(r"^COPY ((?!--).+) \S+$", text, re.MULTILINE) for name in line.split()]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    assert set(copied) == sent
    assert all((ROOT / name).exists() for name in copied)
    assert text.rindex("\nUSER ") > text.rindex("\nRUN ")
    arguments = dict(re.findall(r"^ARG (\w+)=(.+)$", text, re.MULTILINE))
    assert f"torch=={arguments['TORCH']}" in (ROOT / "constraints.txt").read_text("utf-8")
    assert set(arguments["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert f"Python :: {arguments['PYTHON']}" in "\n".join(PROJECT["classifiers"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_labeled_fields_with_ids_of_their_own(path):
    form = yaml.safe_load(path.read_text("utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


def test_a_bug_report_asks_for_the_machine_and_the_environment_of_the_run():
    text = (GITHUB / "ISSUE_TEMPLATE" / "bug_report.yml").read_text("utf-8")
    assert "`trainwright doctor --no-test`" in text
    assert "environment.json" in text


@pytest.mark.parametrize("name", ["CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_lead_to_files(name):
    targets = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", (ROOT / name).read_text("utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_release_notes_are_the_section_of_the_version_with_links_to_the_tag():
    text = "## [1.1.0] - unreleased\nNew.\n\n## [1.0.0] - 2026-01-02\nSee [data](docs/data.md#a).\n\n[1.0.0]: x\n"
    assert release.notes(text, "1.0.0") == "See [data](docs/data.md#a).\n"
    for version, reason in (("1.1.0", "YYYY-MM-DD"), ("0.9.0", "no section")):
        with pytest.raises(SystemExit, match=reason):
            release.notes(text, version)
    shown = release.absolute(
        "[a](docs/a.md#b), ![c](d.png), [e](https://f.org), [g](#h), [![i](j.svg)](k.md)", "R", "v1"
    )
    assert shown == (
        "[a](R/blob/v1/docs/a.md#b), ![c](R/raw/v1/d.png), [e](https://f.org), [g](#h), [![i](j.svg)](R/blob/v1/k.md)"
    )


def test_a_tag_of_another_version_is_rejected():
    with pytest.raises(
        SystemExit, match=re.escape(f"The tag is v9.9.9, but pyproject.toml has version {PROJECT['version']}.")
    ):
        release.main("notes", "v9.9.9")


def test_the_built_packages_have_every_module_and_no_tests(tmp_path):
    hatchling = pytest.importorskip("hatchling.build")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        wheel = tmp_path / hatchling.build_wheel(str(tmp_path))
        source = tmp_path / hatchling.build_sdist(str(tmp_path))
    names = set(zipfile.ZipFile(wheel).namelist())
    # hatchling leaves out what .gitignore matches
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/trainwright").rglob("*.py")}
    assert modules - names == set()
    assert names >= {"trainwright/py.typed", "trainwright/configs/recipes/dpo.yaml", "trainwright/watch/page/watch.js"}
    assert names >= {f"trainwright/templates/{kind.value}/run.yaml" for kind in Kind}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"trainwright"}
    with tarfile.open(source) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert tops >= {"src", "README.md", "LICENSE", "CHANGELOG.md"}
    assert tops.isdisjoint({"tests", "benchmarks", "docs"})
