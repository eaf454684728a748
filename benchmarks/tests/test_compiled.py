"""The benchmark of compiled programs: what is read from them, and the command on CPU."""

import pytest

from benchmarks.compiled import __main__ as compiled
from benchmarks.compiled.program import Program, host_synchronisations
from specjax.core.errors import SpecjaxError
from specjax.core.files import read_json

PROGRAM = """\
HloModule tiny, is_scheduled=true

%taken (rows: f32[100,4], at: s32[]) -> f32[4] {
  %rows = f32[100,4]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,4]{1,0} dynamic-slice(%rows, %at, %zero), dynamic_slice_sizes={1,4}
  ROOT %out = f32[4]{0} bitcast(%one)
}

%written (cache: bf16[1,2,8,4], rows: bf16[1,2,1,4], at: s32[]) -> bf16[1,2,8,4] {
  %cache = bf16[1,2,8,4]{3,2,1,0} parameter(0)
  %rows.1 = bf16[1,2,1,4]{3,2,1,0} parameter(1)
  %at.1 = s32[] parameter(2)
  ROOT %new = bf16[1,2,8,4]{3,2,1,0} dynamic-update-slice(%cache, %rows.1, %at.1, %at.1)
}

%turn (state: (bf16[1,2,8,4], bf16[1,2,1,4], s32[], f32[100,4])) -> (bf16[1,2,8,4]) {
  %state = (bf16[1,2,8,4]{3,2,1,0}, bf16[1,2,1,4]{3,2,1,0}, s32[], f32[100,4]{1,0}) parameter(0)
  %c = bf16[1,2,8,4]{3,2,1,0} get-tuple-element(%state), index=0
  %r = bf16[1,2,1,4]{3,2,1,0} get-tuple-element(%state), index=1
  %a = s32[] get-tuple-element(%state), index=2
  %w = f32[100,4]{1,0} get-tuple-element(%state), index=3
  %drafted = f32[4]{0} fusion(%w, %a), calls=%taken, metadata={op_name="body/gather"}
  %u = bf16[1,2,8,4]{3,2,1,0} fusion(%c, %r, %a), calls=%written, metadata={op_name="pass_of_3/x"}
  %copy.1 = bf16[1,2,8,4]{3,2,1,0} copy(%u)
  %s = (f32[4]{0}, f32[8]{0}) all-gather-start(%drafted), dimensions={0}, metadata={op_name="body"}
  %e = f32[8]{0} all-gather-done(%s), metadata={op_name="body"}
  ROOT %next = (bf16[1,2,8,4]{3,2,1,0}) tuple(%copy.1)
}

%goes_on (state.1: (bf16[1,2,8,4])) -> pred[] {
  %state.1 = (bf16[1,2,8,4]{3,2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (all: (bf16[1,2,8,4])) -> (bf16[1,2,8,4]) {
  %all = (bf16[1,2,8,4]{3,2,1,0}) parameter(0)
  ROOT %loop = (bf16[1,2,8,4]{3,2,1,0}) while(%all), condition=%goes_on, body=%turn
}
"""
COUNTED = """\
%turn (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %at = s32[] get-tuple-element(%state), index=0
  %copied = s32[] copy(%at)
  %two = s32[] constant(2)
  %next = s32[] add(%two, %copied)
  %x = f32[4]{0} get-tuple-element(%state), index=1
  %y = f32[4]{0} all-reduce(%x), to_apply=%sum
  ROOT %out = (s32[], f32[4]{0}) tuple(%next, %y)
}

%goes_on (state.1: (s32[], f32[4])) -> pred[] {
  %state.1 = (s32[], f32[4]{0}) parameter(0)
  %end = s32[] constant(8)
  %at.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %yes = pred[] compare(%at.1, %end), direction=LT
}

ENTRY %main (x.1: f32[4]) -> (s32[], f32[4]) {
  %x.1 = f32[4]{0} parameter(0)
  %start = s32[] constant(1)
  %all = (s32[], f32[4]{0}) tuple(%start, %x.1)
  ROOT %loop = (s32[], f32[4]{0}) while(%all), condition=%goes_on, body=%turn
}
"""
THUNKS = """000: kCommandBuffer [source | sink]
    001: kWhile        [source | sink]
023: kWhile         [prev=000 (1) | next=069 (1)]
condition:
    024: kCustomKernel [source | sink] wrapped_compare
  body:
    000: kCommandBuffer [source | sink]
        025: kConditional [source | sink]
    026: kConditional [source | sink]
"""


def test_a_round_is_read_from_a_program():
    program = Program(PROGRAM)
    assert program.round_body() == "turn"
    costs = program.costs("turn", (1, 2, 8, 4))
    assert costs["draft"].read == 4 * 4 + 4 + 4 * 4  # the row, and where it is; then the gathered
    assert (costs["draft"].collectives, costs["draft"].moved, costs["3"].collectives) == (1, 32, 0)
    assert costs["draft"].cache_copies == 0
    assert costs["3"].read == 2 * 4 * 2 + 4 + 2 * 8 * 4 * 2  # rows and place; then the copy
    assert (costs["3"].kernels, costs["3"].cache_copies) == (2, 1)


def test_the_turns_of_a_loop_that_counts_are_known():
    cost = Program(COUNTED).costs("main", ())["draft"]
    assert (cost.collectives, cost.moved) == (4, 4 * 16)  # at 1, 3, 5 and 7


def test_what_the_host_decides_is_counted():
    assert host_synchronisations(THUNKS) == 2


@pytest.mark.slow
def test_the_command_compiles_for_this_cpu(tmp_path, capsys):
    options = compiled.CompiledOptions(
        out=tmp_path,
        devices=("cpu",),
        sizes=("tiny",),
        methods=("pld",),
        temperatures=(0.0,),
        layers=(1, 2),
        prompt_length=(8,),
        max_new_tokens=8,
        padded_width=16,
    )
    compiled.run(options)
    (row,) = read_json(tmp_path / "compiled.json")["rows"]
    assert (row["method"], row["layers"], row["widths"]) == ("pld", 2, [11])
    assert row["pass_read"] > row["floor"]
    assert row["cache_copies"] == 0
    assert row["host_syncs"] is None
    compiled.run(options)  # replaces the row
    assert len(read_json(tmp_path / "compiled.json")["rows"]) == 1
    printed = capsys.readouterr().out
    assert "| pld" in printed and f"Compiled from revision {row['revision']} with" in printed
    assert "; passes padded to 16 tokens. `" in printed and " --padded-width 16`" in printed
    with pytest.raises(SpecjaxError, match="unknown"):
        compiled.run(compiled.CompiledOptions(devices=("h200",)))
