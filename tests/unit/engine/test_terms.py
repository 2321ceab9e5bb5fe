"""Terms that a policy does not keep to are refused by name."""

import pytest

from quire.engine.terms import NO_TERMS, check_terms
from quire.errors import InvalidRequestError
from quire.protocol.requests import Terms


def test_terms_of_the_policy_that_there_is() -> None:
    for policy in ("fcfs", "priority", "fair", "shortest", "deadline"):
        check_terms(NO_TERMS, policy)
        check_terms(Terms(client="me"), policy)
    check_terms(Terms(priority=-3), "priority")
    check_terms(Terms(ttft_target=0.5, tpot_target=1), "deadline")


@pytest.mark.parametrize(
    ("terms", "policy", "message"),
    [
        (Terms(priority=3), "fair", "priority=3 needs an engine with scheduling_policy='priority'"),
        (Terms(priority="3"), "priority", "priority must be an integer, got '3'"),  # type: ignore[arg-type]
        (Terms(ttft_target=0.5), "fcfs", "ttft_target=0.5 needs an engine with scheduling_policy='deadline'"),
        (Terms(tpot_target=0.5), "priority", "tpot_target=0.5 needs"),
        (Terms(ttft_target=0.0), "deadline", "ttft_target must be a number, over 0, got 0.0"),
        (Terms(tpot_target=float("nan")), "deadline", "tpot_target must be a number"),
        (Terms(tpot_target="1"), "deadline", "tpot_target must be a number"),  # type: ignore[arg-type]
        (Terms(client=""), "fair", "client must be a text of 1 to 200 characters, got 0 characters"),
        (Terms(client=7), "fair", "client must be a text of 1 to 200 characters, got 7"),  # type: ignore[arg-type]
    ],
)
def test_bad_terms(terms: Terms, policy: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_terms(terms, policy)
