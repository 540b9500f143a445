from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from belayer_env.errors import InvalidInput
from belayer_env.ledger import Ledger, Step, observation_digest


def step(number: int, observation: str = "ok") -> Step:
    return Step(number=number, action=f"echo {number}", observation=observation, exit_code=0)


def test_steps_are_numbered_without_a_gap() -> None:
    ledger = Ledger([step(1), step(2)])
    for number in (1, 2, 4):
        with pytest.raises(InvalidInput, match="does not follow step 2"):
            ledger.append(step(number))
    with pytest.raises(InvalidInput):
        step(0)


def test_prefix_and_since_split_the_ledger_anywhere() -> None:
    ledger = Ledger(step(n) for n in range(1, 6))
    for n in range(6):
        assert ledger.prefix(n) + ledger.since(n) == ledger.steps
        assert len(ledger.prefix(n)) == n


def test_no_prefix_beyond_either_end() -> None:
    ledger = Ledger([step(1)])
    for n in (-1, 2):
        for method in (ledger.prefix, ledger.since, ledger.cut):
            with pytest.raises(InvalidInput):
                method(n)
    assert len(ledger) == 1


@given(st.text(), st.integers(), st.text(), st.integers())
def test_digests_differ_where_observation_or_code_do(a: str, code_a: int, b: str, code_b: int) -> None:
    is_equal = (a, code_a) == (b, code_b)
    assert (observation_digest(a, code_a, False) == observation_digest(b, code_b, False)) == is_equal


def test_time_outs_are_alike_and_unlike_all_else() -> None:
    assert observation_digest("par", 124, True) == observation_digest("partial", 137, True)
    assert observation_digest("par", 124, True) != observation_digest("par", 124, False)


@given(st.text(), st.text(), st.integers(), st.booleans())
def test_a_step_survives_json(action: str, observation: str, code: int, timed_out: bool) -> None:
    before = Step(number=3, action=action, observation=observation, exit_code=code, timed_out=timed_out)
    assert Step.from_json(before.to_json()) == before


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.model = Ledger(), list[Step]()

    @rule(text=st.text(max_size=5))
    def append(self, text: str) -> None:
        self.model.append(step(len(self.model) + 1, text))
        self.ledger.append(self.model[-1])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.model)))
        assert list(self.ledger.cut(n)) == self.model[n:]
        del self.model[n:]

    @invariant()
    def equals_model(self) -> None:
        assert list(self.ledger.steps) == self.model


TestLedgerMachine = LedgerMachine.TestCase
