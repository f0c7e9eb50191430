"""The figures of README and user pages are those of the committed results."""

import re

import pytest

from benchmarks import page_claims

CLAIMS = page_claims.all_page_claims()
ROW = re.compile(r"(\| [−+]?[\d.,]+%? ){2,}\|$")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page}: {claim.text[:40]}")
def test_a_figure_is_that_of_its_file(claim: page_claims.PageClaim) -> None:
    assert claim.holds, f"{claim.page} should say {claim.text!r}, from {claim.file}"


def test_every_row_of_figures_in_the_readme_is_traced() -> None:
    page = (page_claims.ROOT / page_claims.README).read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if ROW.search(line)]
    traced = {claim.text for claim in CLAIMS if claim.page == page_claims.README}
    assert len(rows) >= 8
    assert [row for row in rows if row not in traced] == []


def test_numbers() -> None:
    assert str(page_claims.decimal(306.5)) == "307"
    assert str(page_claims.decimal(31.25, 1)) == "31.3"
    numbers = [page_claims.two_digits(x) for x in (2.46e-6, 0.0063, 0.31)]
    assert numbers == ["0.0000025", "0.0063", "0.31"]
