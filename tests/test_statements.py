"""Every statement of the reference systems' documents holds here, or is refused by its sentence."""

from collections import Counter

import pytest
from statements import BASES, PAGE, STATEMENTS, SYSTEMS, page

from sciftune.core.registry import records


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_statement_holds(system):
    if BASES[system]["model"] not in records("models"):
        pytest.skip("the model is an extra that is not here")
    rows = [row for row in STATEMENTS if row.system == system]
    faults = [f"{row.says}: {fault}" for row in rows if (fault := row.fault())]
    assert not faults, "\n".join(faults)


def test_none_is_missing_from_the_page():
    assert PAGE.read_text() == page(), "python tests/tools/statements.py"
    assert len(STATEMENTS) >= 188
    assert not [
        row for row, count in Counter((r.system, r.says) for r in STATEMENTS).items() if count > 1
    ]
