"""Files that other programs than Python read: workflows, templates, the image."""

import re
import shlex
import tomllib

import yaml

from sciftune.core.rundir import RunDir


def workflows(root):
    """Path -> workflow. YAML reads the key `on` as true."""
    return {path: yaml.safe_load(path.read_text()) for path in root.glob(".github/workflows/*.yml")}


def steps(workflow):
    """Every step of every job."""
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_workflows_are_pinned_and_have_no_rights(root):
    assert len(workflows(root)) >= 2
    for path, workflow in workflows(root).items():
        assert "secrets" not in path.read_text()
        assert workflow["permissions"] == {"contents": "read"}, path
        assert all("timeout-minutes" in job for job in workflow["jobs"].values()), path
        for step in steps(workflow):
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/x@v1")), step


def test_workflows_call_programs_that_are_there(root):
    calls = [
        step["run"] for flow in workflows(root).values() for step in steps(flow) if "run" in step
    ]
    for words in map(shlex.split, calls):
        assert words[0] == ".venv/bin/python" or (root / words[0]).stat().st_mode & 0o111, words
    jobs = yaml.safe_load((root / ".github/workflows/test.yml").read_text())["jobs"]
    ran = {name: (job["if"], job["steps"][-1]["run"]) for name, job in jobs.items()}
    assert ran["quick"] == ("github.event_name == 'push'", "scripts/test --quick")
    assert ran["whole"] == ("github.event_name == 'pull_request'", "scripts/test")
    assert ran["slow"] == ("github.event_name == 'schedule'", "scripts/test --slow")


def test_the_oldest_and_newest_torch_are_tried(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    (torch,) = (word for word in project["dependencies"] if re.match(r"torch\b", word))
    oldest, before = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups()
    jobs = yaml.safe_load((root / ".github/workflows/test.yml").read_text())["jobs"]
    tried = {row["torch"] for row in jobs["versions"]["strategy"]["matrix"]["include"]}
    assert tried == {f"2.{oldest}.0", f"2.{int(before) - 1}.0"}


def test_a_bug_is_asked_for_files_that_a_run_writes(root):
    form = yaml.safe_load((root / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    labels = " ".join(part["attributes"].get("label", "") for part in form["body"])
    run = RunDir("runs/x")
    for path in (run.recipe, run.plan, run.log):
        assert path.name in labels
    for path in root.glob(".github/ISSUE_TEMPLATE/*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        names = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(set(names)) == len(names) > 1


def test_the_image_runs_as_a_user_and_starts_a_script(root):
    lines = (root / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1] not in ("root", "0")
    copied = next(i for i, line in enumerate(lines) if line.startswith("COPY "))
    assert any(line.startswith("USER ") for line in lines[:copied])
    (command,) = re.findall(r'^CMD \["(\S+)"\]', "\n".join(lines), re.M)
    assert (root / command).stat().st_mode & 0o111
    left_out = (root / ".dockerignore").read_text().split()
    assert not {"sciftune", "nbs", "scripts", "pyproject.toml", "README.md"} & set(left_out)
