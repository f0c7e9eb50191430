"""The choice of the law matrix' cells: pure functions, held to what they promise."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import matrix
from tests.covering import covering, pairs_of, share

FAMILIES = {
    "cache": (matrix.cache_cells, matrix.CACHE_PAIRS, 5),
    "operations": (matrix.cache_cells, matrix.OPERATION_PAIRS, 5),
    "both": (matrix.cache_cells, matrix.CACHE_PAIRS + matrix.OPERATION_PAIRS, 5),
    "mesh": (matrix.mesh_cells, matrix.MESH_PAIRS, 50),
    "copy": (matrix.copy_cells, matrix.COPY_PAIRS, 5),
    "path": (matrix.path_cells, matrix.PATH_PAIRS, 5),
}
"""Cells, their pairs, and how many times as many as are chosen there are."""


def chosen(family):
    make, kinds, _ = FAMILIES[family]
    return matrix.choice(make(), kinds)


@pytest.mark.parametrize("family", ["cache", "operations"])
def test_chosen_among_a_covering_set_they_cover_as_much(family):
    """As the laws of caches are, which share what they make."""
    make, kinds, _ = FAMILIES[family]
    found = matrix.choice(chosen("both"), kinds)
    assert {*found} <= {*chosen("both")}
    assert {p for cell in found for p in pairs_of(cell, kinds)} == {
        pair for cell in make() for pair in pairs_of(cell, kinds)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_is_in_a_cell_and_few_cells_are_chosen(family):
    make, kinds, times = FAMILIES[family]
    every = make()
    assert len({cell.id for cell in every}) == len(every) == len({*every})
    found = frozenset().union(*(pairs_of(cell, kinds) for cell in chosen(family)))
    assert found == frozenset().union(*(pairs_of(cell, kinds) for cell in every))
    assert times * len(chosen(family)) < len(every)
    assert chosen(family) == chosen(family)


def test_the_pairs_are_those_of_all_parts():
    """Counted by hand from the parts' names: nothing is lost with cells that can't be."""
    codecs = {*matrix.RAW, *matrix.CODECS}
    found = {pair for cell in chosen("cache") for pair in pairs_of(cell, matrix.CACHE_PAIRS)}

    def all_but(kind, some, others, *, missing=frozenset()):
        wanted = {(kind, a, b) for a, b in itertools.product(some, others)}
        assert {pair for pair in found if pair[0] == kind} == wanted - missing

    all_but(("codecs", "layout"), codecs, matrix.LAYOUTS)
    all_but(("layout", "placement"), matrix.LAYOUTS, matrix.PLACEMENTS)
    all_but(("codecs", "placement"), codecs, matrix.PLACEMENTS)
    found = {
        pair for cell in chosen("operations") for pair in pairs_of(cell, matrix.OPERATION_PAIRS)
    }
    all_but(("operations", "codecs"), matrix.OPERATIONS, codecs)
    all_but(("operations", "placement"), matrix.OPERATIONS, matrix.PLACEMENTS)
    kind, grows = ("operations", "layout"), {"growing"}
    others = {(kind, "grow", layout) for layout in matrix.LAYOUTS if layout not in grows}
    all_but(kind, matrix.OPERATIONS, matrix.LAYOUTS, missing=others)
    found = {pair for cell in chosen("mesh") for pair in pairs_of(cell, matrix.MESH_PAIRS)}
    refused = {(("layout", "mesh"), *names) for names in matrix.REFUSED}
    all_but(("layout", "mesh"), matrix.LAYOUTS, matrix.MESHES, missing=refused)
    assert {codec for cell in chosen("mesh") for codec in cell.codecs} == codecs
    found = {pair for cell in chosen("copy") for pair in pairs_of(cell, matrix.COPY_PAIRS)}
    all_but(("form", "codecs"), matrix.FORMS, codecs)
    all_but(("form", "layout"), matrix.FORMS, matrix.LAYOUTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_telling_cells_are_few_and_have_every_part(family):
    every = FAMILIES[family][0]()
    found = matrix.smallest_set(chosen(family))
    assert {*found} <= {*chosen(family)} and len(found) == len({*found}) <= 14
    alone = [(name, name) for name in every[0]._fields]

    def parts(some):
        return frozenset().union(*(pairs_of(cell, alone) for cell in some))

    assert parts(found) == parts(every)
    for cell in found:
        assert parts([other for other in found if other != cell]) != parts(found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [1, 20])
def test_every_other_cell_is_in_one_share(family, parts):
    every, taken = FAMILIES[family][0](), chosen(family)
    shares = [share(every, taken, number, parts) for number in range(1, parts + 1)]
    assert sorted([*taken, *itertools.chain(*shares)]) == sorted(every)
    sizes = [len(one) for one in shares]
    assert max(sizes) - min(sizes) <= 1
    assert share(every, taken, parts + 3, parts) == share(every, taken, 3, parts)


@given(st.lists(st.frozensets(st.integers(0, 30), max_size=6), min_size=1, max_size=20))
def test_any_sets_are_covered(sets):
    """And every set that is taken brings something new."""
    found = covering([*range(len(sets))], lambda number: sets[number])
    held = frozenset()
    for number in found:
        assert not sets[number] <= held
        held |= sets[number]
    assert held == frozenset().union(*sets)


def test_the_environment_chooses_cells(monkeypatch):
    every, kinds = matrix.copy_cells(), matrix.COPY_PAIRS

    def of(**names):
        for name, value in {"FULL": False, "SHARD": None, **names}.items():
            monkeypatch.setattr(matrix, name, value)
        return [param.values[0] for param in matrix.cells(every, kinds)]

    assert of() == chosen("copy") and of(FULL=True) == every
    quick = [
        param.values[0]
        for param in matrix.cells(every, kinds)
        if "slow" not in {mark.name for mark in param.marks}
    ]
    assert {*quick} == {*matrix.smallest_set(chosen("copy"))}
    taken = chosen("copy")
    assert of(SHARD="3/20") == of(SHARD="3/20", FULL=True) == share(every, taken, 3, 20)
