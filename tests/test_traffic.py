"""Memory traffic and large arrays that ``kvjax.memory.hlo`` reads from HLO texts."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.memory.hlo import bytes_by_instruction, bytes_moved, collectives, large_results

KIB = 1024
A = "%a = f32[1024]{0} parameter(0)\n"
VMEM = "f32[1024]{0:T(1024)S(1)}"


def text(entry, **computations):
    """The text of a program from its instructions and the computations that it calls."""
    bodies = " ".join([entry, *computations.values()])
    computations = {name: body for name, body in computations.items() if f"%{name}" in bodies}
    parts = ["HloModule m, is_scheduled=true, entry_computation_layout={()->f32[]}\n"]
    for name, body in {**computations, "ENTRY": entry}.items():
        head = "ENTRY %main" if name == "ENTRY" else f"%{name}"
        lines = [f"  {line.strip()}" for line in body.strip().splitlines()]
        parts.append("\n".join([f"{head} (p: f32[1024]) -> f32[] {{", *lines, "}\n"]))
    return "\n".join(parts)


def test_operands_are_read_and_results_written():
    program = text(
        """
        %a = f32[1024]{0} parameter(0)
        %b = f32[256]{0} parameter(1)
        %small = f32[256]{0} negate(%b), metadata={op_name="jit(f)/neg"}
        ROOT %large = f32[4096]{0} broadcast(%a), dimensions={0}, control-predecessors={%small}
        """
    )
    rows = [(20 * KIB, "broadcast large f32[4096]{0}"), (2 * KIB, "negate small f32[256]{0}")]
    assert bytes_by_instruction(program) == rows
    assert bytes_moved(program) == 22 * KIB


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("s4[8,1024]{1,0:T(8,128)(8,1)E(4)}", 4 * KIB),
        ("u4[3]{0}", 2),
        ("pred[1024]{0}", KIB),
        ("f8e4m3fn[1024]{0}", KIB),
        ("bf16[8,1024]{1,0:T(8,128)(2,1)}", 16 * KIB),
        ("c64[1024]{0}", 8 * KIB),
        ("s32[]{:T(128)}", 4),
    ],
)
def test_bytes_are_those_of_the_type(shape, size):
    assert bytes_moved(text(f"%a = {shape} parameter(0)\nROOT %b = {shape} copy(%a)")) == 2 * size


@pytest.mark.parametrize("memory", [1, 2, 5, 6])
def test_other_memories_do_not_count(memory):
    shape = f"f32[1024]{{0:T(1024)S({memory})}}"
    program = f"{A} %b = {shape} parameter(1)\n ROOT %c = {shape} add(%a, %b)"
    assert bytes_moved(text(program)) == 4 * KIB


def test_names_and_constants_move_nothing():
    program = """
        %b = f32[8,128]{1,0} bitcast(%a)
        %c = f32[1024]{0} reshape(%b)
        %d = (f32[1024]{0}, f32[8,128]{1,0}) tuple(%c, %b)
        %e = (f32[1024]{0}, f32[8,128]{1,0}) opt-barrier(%d)
        %f = s32[1024]{0} iota(), iota_dimension=0
        ROOT %g = f32[1024]{0} get-tuple-element(%e), index=0
        """
    assert bytes_by_instruction(text(A + program)) == []


def test_a_reshape_of_tiles_moves_them():
    shape = "f32[8,128]{1,0:T(8,128)}"
    assert bytes_moved(text(f"{A} ROOT %b = {shape} reshape(%a)")) == 8 * KIB


@pytest.mark.parametrize(
    ("source", "to", "kib"), [("", "S(1)", 4), ("S(1)", "", 4), ("", "", 8), ("S(5)", "S(1)", 0)]
)
def test_a_copy_counts_where_it_starts(source, to, kib):
    source, to = (f"f32[1024]{{0:T(1024){memory}}}" for memory in (source, to))
    program = f"""
        %a = {source} parameter(0)
        %s = ({to}, {source}, u32[]{{:S(2)}}) copy-start(%a)
        ROOT %d = {to} copy-done(%s)
        """
    assert bytes_moved(text(program)) == kib * KIB


@pytest.mark.parametrize("again", [False, True])
def test_what_the_run_before_has_fetched_counts_once(again):
    start = f"({VMEM}, f32[1024]{{0}}, u32[]{{:S(2)}}) copy-start(%a)"
    program = f"""
        %s = {start}, cross_program_prefetch_index=0
        %d = {VMEM} copy-done(%s)
        ROOT %b = {VMEM} negate(%d)
        """
    for_the_next = f" %t = {start}\n %e = {VMEM} copy-done(%t)" if again else ""
    assert bytes_moved(text(A + program + for_the_next)) == 4 * KIB


def test_what_is_fetched_in_pieces_counts_once():
    piece = "f32[512]{0:T(512)S(1)}"
    start = f"((f32[1024]{{0}}), {piece}, s32[]{{:S(2)}}) slice-start(%a)"
    program = f"""
        %s = {start}, slice={{[0:512]}}
        %t = {start}, slice={{[512:1024]}}
        %d = {piece} slice-done(%s)
        %e = {piece} slice-done(%t)
        %c = {VMEM} custom-call(%d, %e), custom_call_target="ConcatBitcast"
        ROOT %b = {VMEM} negate(%c)
        """
    assert bytes_moved(text(A + program)) == 4 * KIB


FUSION = f"{A} %i = s32[] parameter(1)\n ROOT %f = f32[64]{{0}} fusion(%a, %i), calls=%fused"


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ("ROOT %s = f32[64]{0} dynamic-slice(%p, %n), dynamic_slice_sizes={64}", 260),
        ("ROOT %s = f32[64]{0} gather(%p, %n), slice_sizes={64}", 260),
        (
            """
            %c = bf16[1024]{0} convert(%p)
            %b = bf16[1024]{0} bitcast(%c)
            %s = bf16[64]{0} slice(%b), slice={[0:64]}
            %t = bf16[64]{0} slice(%b), slice={[64:128]}
            ROOT %r = f32[64]{0} multiply(%s, %t)
            """,
            512,
        ),
        (
            """
            %s = f32[64]{0} slice(%p), slice={[0:64]}
            %t = f32[] reduce(%p, %s), to_apply=%inner
            ROOT %r = f32[64]{0} broadcast(%t), dimensions={}
            """,
            4 * KIB,
        ),
        ("ROOT %r = f32[64]{0} fusion(%p), calls=%inner", 128),
        ("ROOT %r = f32[64]{0} call(%p), to_apply=%inner", 128),
    ],
)
def test_a_fusion_reads_what_is_wanted_of_an_operand(body, read):
    inner = """
        %p.1 = f32[1024]{0} parameter(0)
        %s.1 = f32[32]{0} slice(%p.1), slice={[0:32]}
        ROOT %r.1 = f32[64]{0} pad(%s.1, %s.1), padding=0_32
        """
    # The parameters of a computation may be in any order.
    fused = f"%n = s32[] parameter(1)\n %p = f32[1024]{{0}} parameter(0)\n {body}"
    assert bytes_moved(text(FUSION, inner=inner, fused=fused)) == read + 256


UPDATED = """
    %p = f32[1024]{0} parameter(0)
    %u = f32[64]{0} parameter(1)
    %n = s32[] parameter(2)
    """
IN_PLACE = """
    %a = f32[1024]{0} parameter(0)
    %b = f32[64]{0} parameter(1)
    %i = s32[] parameter(2)
    """
UPDATES = [
    "ROOT %r = f32[1024]{0} dynamic-update-slice(%p, %u, %n)",
    "ROOT %r = f32[1024]{0} scatter(%p, %n, %u), to_apply=%inner",
    """
    %d = f32[1024]{0} dynamic-update-slice(%p, %u, %n)
    ROOT %r = f32[1024]{0} bitcast(%d)
    """,
    """
    %c = f32[1024]{0} fusion(%p), output_to_operand_aliasing={{}: (0, {})}, calls=%copied
    ROOT %r = f32[1024]{0} dynamic-update-slice(%c, %u, %n)
    """,
]
CALLED = {
    "inner": "ROOT %x = f32[] parameter(0)",
    "copied": "%y = f32[1024]{0} parameter(0)\n ROOT %z = f32[1024]{0} copy(%y)",
}


@pytest.mark.parametrize("body", UPDATES)
def test_an_update_in_place_moves_what_is_new(body):
    fusion = IN_PLACE + "ROOT %f = f32[1024]{0} fusion(%a, %b, %i), calls=%fused"
    program = text(fusion, **CALLED, fused=UPDATED + body)
    assert bytes_moved(program) == 256 + 4 + 256
    assert large_results(program, 4 * KIB) == []


@pytest.mark.parametrize("body", UPDATES[:2])
def test_an_update_that_is_not_fused_moves_what_is_new(body):
    program = text(UPDATED + body, **CALLED)
    assert bytes_moved(program) == 256 + 4 + 256
    assert large_results(program, 4 * KIB) == []


def test_an_update_of_what_a_fusion_makes_is_not_in_place():
    fusion = IN_PLACE + "ROOT %f = f32[1024]{0} fusion(%a, %b, %i), calls=%fused"
    body = """
        %m = f32[1024]{0} negate(%p)
        ROOT %r = f32[1024]{0} dynamic-update-slice(%m, %u, %n)
        """
    program = text(fusion, fused=UPDATED + body)
    assert bytes_moved(program) == 4 * KIB + 256 + 4 + 4 * KIB
    assert large_results(program, 4 * KIB) == ["fusion:dynamic-update-slice f32[1024]{0}"]


def test_a_fusion_of_several_results_updates_one_and_makes_another():
    both = "(f32[1024]{0}, f32[2048]{0})"
    fusion = IN_PLACE + f"ROOT %f = {both} fusion(%a, %b, %i), calls=%fused"
    body = f"""
        %d = f32[1024]{{0}} dynamic-update-slice(%p, %u, %n)
        %w = f32[2048]{{0}} broadcast(%u), dimensions={{0}}
        ROOT %t = {both} tuple(%d, %w)
        """
    program = text(fusion, fused=UPDATED + body)
    assert bytes_moved(program) == 256 + 4 + 256 + 8 * KIB
    made = ["fusion:dynamic-update-slice,broadcast f32[2048]{0}"]
    assert large_results(program, 4 * KIB) == made


LOOP = "ROOT %w = f32[1024]{0} while(%a), condition=%inner, body=%body"
BODY = "%x = f32[1024]{0} parameter(0)\n ROOT %y = f32[1024]{0} negate(%x)"


def test_a_loop_counts_as_often_as_it_runs():
    known = LOOP + ', backend_config={"known_trip_count":{"n":"5"}}'
    assert bytes_moved(text(A + known, **CALLED, body=BODY)) == 5 * 8 * KIB
    assert bytes_moved(text(A + known, **CALLED, body=BODY), trips=3) == 5 * 8 * KIB


def test_a_loop_of_unknown_steps_counts_once_or_as_often_as_is_said():
    program = text(A + LOOP, **CALLED, body=BODY)
    assert bytes_moved(program) == 8 * KIB
    assert bytes_moved(program, trips=3) == 3 * 8 * KIB


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%one, %two, %none}", "true_computation=%two, false_computation=%none"],
)
def test_of_a_conditional_the_branch_counts_that_moves_the_most(branches):
    program = text(
        f"{A} %i = s32[] parameter(1)\n"
        f"ROOT %c = f32[1024]{{0}} conditional(%i, %a, %a, %a), {branches}",
        one=BODY,
        two=f"{BODY.replace('ROOT ', '')}\n ROOT %z = f32[1024]{{0}} negate(%y)",
        none="ROOT %x = f32[1024]{0} parameter(0)",
    )
    assert bytes_moved(program) == 16 * KIB


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %c = f32[1024]{0} call(%a), to_apply=%body",
        """
        %s = ((f32[1024]{0}), f32[1024]{0}, u32[]) async-start(%a), calls=%body
        ROOT %d = f32[1024]{0} async-done(%s)
        """,
    ],
)
def test_what_is_called_counts(line):
    program = text(A + line, body=BODY)
    assert bytes_moved(program) == 8 * KIB
    assert large_results(program, 4 * KIB) == ["negate f32[1024]{0}"]


def test_a_kernel_reads_its_operands_and_writes_what_is_new():
    kernel = (
        "%b = f32[2048]{0:T(1024)S(1)} parameter(1)\n"
        "ROOT %k = (f32[1024]{0}, f32[64]{0}) custom-call(%a, %b), "
        'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{0}: (0, {})}'
    )
    program = text(A + kernel)
    assert bytes_moved(program) == 4 * KIB + 256
    assert large_results(program, 4 * KIB) == []


def test_the_workspace_of_a_matrix_product_is_not_moved():
    product = (
        "ROOT %k = (f32[1024]{0}, s8[4194304]{0}) custom-call(%a), "
        'custom_call_target="__cublas$lt$matmul"'
    )
    assert bytes_moved(text(A + product)) == 8 * KIB


def test_memory_that_is_only_taken_is_not_moved():
    program = text('ROOT %k = f32[1024]{0} custom-call(), custom_call_target="AllocateBuffer"')
    assert bytes_moved(program) == 0
    assert large_results(program, 4 * KIB) == ["custom-call:AllocateBuffer f32[1024]{0}"]


def test_rows_are_fetched_from_the_host_and_written_there():
    host, row = "f32[1024]{0:T(1024)S(5)}", "f32[64]{0:T(1024)}"
    program = text(
        f"""
        %a = {host} parameter(0)
        %b = {row} parameter(1)
        %i = s32[]{{:S(6)}} parameter(2)
        %s = (({host}, s32[]), {row}, u32[]{{:S(2)}}) dynamic-slice-start(%a, %i)
        %d = {row} dynamic-slice-done(%s)
        %t = (({host}, {row}, s32[]), {host}, u32[]{{:S(2)}}) dynamic-update-slice-start(%a, %b, %i)
        ROOT %e = {host} dynamic-update-slice-done(%t)
        """
    )
    assert bytes_moved(program) == 256 + 256
    assert large_results(program, 4 * KIB) == []


def test_large_results_are_those_of_fast_memory_too():
    program = f"""
        %s = ({VMEM}, f32[1024]{{0}}, u32[]{{:S(2)}}) copy-start(%a)
        %d = {VMEM} copy-done(%s)
        %n = {VMEM} negate(%d)
        ROOT %f = bf16[1024]{{0}} fusion(%n), calls=%fused
        """
    fused = f"%p = {VMEM} parameter(0)\n %n = {VMEM} negate(%p)"
    program = text(A + program, fused=f"{fused}\n ROOT %c = bf16[1024]{{0}} convert(%n)")
    assert large_results(program, 4 * KIB) == [f"copy-start {VMEM}", f"negate {VMEM}"]
    assert large_results(program, 4 * KIB + 1) == []
    assert len(large_results(program, 2 * KIB)) == 3


def test_a_product_that_is_compiled_here_reads_its_operands_and_writes_itself():
    x, y = jnp.ones((128, 64)), jnp.ones((64, 256))
    program = str(jax.jit(jnp.matmul).lower(x, y).compile().as_text())
    assert bytes_moved(program) == 4 * (128 * 64 + 64 * 256 + 128 * 256)
    assert len(large_results(program, 4 * 128 * 256)) == 1


def test_a_row_that_is_written_here_is_no_large_result():
    def write(cache, row, at):
        return jax.lax.dynamic_update_slice(cache, row, (at, 0))

    given = jnp.zeros((512, 64)), jnp.ones((1, 64)), 3
    program = str(jax.jit(write, donate_argnums=0).lower(*given).compile().as_text())
    assert bytes_moved(program) < 4 * KIB
    assert large_results(program, 4 * KIB) == []


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,1,2,3}}", 4), ("{{0,2},{1,3}}", 2), ("[4,2]<=[8]", 2), ("{}", 8),
        ("mesh['data'=2,'tensor'=4] {'tensor'}", 4),
        ("mesh['data'=2,'tensor'=4] {'data','tensor'}", 8), ("mesh['axis_0'=8] {'axis_0':(1)2}", 2),
    ],
)  # fmt: skip
def test_who_takes_part_in_a_collective(groups, devices):
    program = text(
        f"{A}ROOT %r = f32[1024]{{0}} all-reduce(%a), replica_groups={groups}, to_apply=%add",
        add="ROOT %s = f32[] parameter(0)",
    )
    (found,) = collectives(program, 8)
    assert (found.kind, found.bytes, found.devices) == ("all-reduce", 4 * KIB, devices)
    assert found.sent == 2 * (devices - 1) * 4 * KIB // devices


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("f32[4096]{0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={0}", 12 * KIB),
        ("(f32[1024]{0}, f32[4096]{0}) all-gather-start(%a), replica_groups={{0,1,2,3}}", 12 * KIB),
        ("f32[256]{0} reduce-scatter(%a), replica_groups={{0,1,2,3}}, to_apply=%add", 3 * KIB),
        ("f32[1024]{0} all-to-all(%a), replica_groups={{0,1,2,3}}, dimensions={0}", 3 * KIB),
        ("f32[1024]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}", 4 * KIB),
        ("f32[1024]{0} negate(%a), metadata={}", None),
    ],
)
def test_bytes_that_a_device_sends(line, sent):
    found = collectives(text(f"{A}ROOT %r = {line}", add="ROOT %s = f32[] parameter(0)"))
    assert [each.sent for each in found] == ([] if sent is None else [sent])
