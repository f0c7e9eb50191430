"""The planted faults are still faults of lines that are there."""

import pytest

from tests.planted_faults import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_line_of_a_fault_stands_in_its_file_once(fault):
    text = (ROOT / "kvjax" / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.line) == 1
    assert fault.fault not in text and fault.fault.count("\n") == 0
