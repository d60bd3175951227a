"""Tests that are skipped name what is there, and call it as it is defined."""

import jobs
import pytest
from used_names import wrong_uses

NAMES = dict(jobs=jobs, wait=jobs.wait, taken=jobs)


@pytest.mark.parametrize(
    "source,wrong",
    [
        ("jobs.begin(1)\nwait(1, pause=2)\njobs.begin.any", ""),
        ("def test():\n    jobs.nothing", "line 2: jobs has no nothing"),
        ("jobs.begin(1, 2)", "line 1: begin: too many positional arguments"),
        ("wait(1, paus=2)", "line 1: wait: got an unexpected keyword argument 'paus'"),
        ("wait()", "line 1: wait: missing a required argument: 'ready'"),
        ("wait(*some)\nwait(**more)\njobs.made = jobs", ""),
        ("def test(taken):\n    taken.nothing", ""),
        ("from sciftune.lab import jobs, scores", ""),
        ("from sciftune.lab.jobs import nothing", "line 1: sciftune.lab.jobs has no nothing"),
        ("from sciftune.lab.nothing import x", "line 1: sciftune.lab.nothing has no x"),
    ],
)
def test_wrong_uses_are_found_without_running(source, wrong):
    assert "\n".join(wrong_uses(source, NAMES)) == wrong
